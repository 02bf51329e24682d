"""Options, order of the requests, and rows."""

import argparse
import statistics
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import anyio

from benchmarks.options import counts, names
from benchmarks.rows import Measured, Row, compare, percentile, print_rows, there_and_back
from benchmarks.vllm_handover.client import Answer, BenchFailed, ask, hand_over, hand_over_at_once, prompt_of, prompts
from benchmarks.vllm_handover.soak import soak
from benchmarks.vllm_handover.throughput import Load, load
from benchmarks.vllm_handover.timeline import BETWEEN, FIRST_TOKEN, HANDOVER, SPANS, WITHIN_MOVE, read_events, spans
from kvflow.cli.options import check_installed, check_positive
from kvflow.cli.tasks import open_tasks
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from benchmarks.vllm_handover.servers import Pair

__all__ = ["add_arguments", "prepare"]

TOKENS: Final = 12
WAYS: Final = ("kvflow", "patched", "NixlConnector", "NixlConnector+sleep", "none")
AT_ONCE: Final = "both servers asked at once with kvflow"
PATCHED_AT_ONCE: Final = "both servers asked at once, patched"
OWN: Final = {AT_ONCE: "kvflow", PATCHED_AT_ONCE: "patched"}
"""Pairs whose servers are both asked at once."""
FIRST_PORT: Final = 8110
SETTLE_S: Final = 3.0
SPIN_S: Final = 1.5
"""Wait between requests to different pairs: vLLM's workers busy-wait for a second after each, on all CPUs."""

MOST_WORDS: Final = 1300
WRONG: Final = 5
MOST_FAILURES: Final = 10
WARM: Final = 16
MEASURES: Final = ("times", "texts", "idle", "soak", "throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--measures", type=names, default="times,texts,idle", metavar="NAME,...", help="what to do")
    parser.add_argument(
        "--ways",
        type=names,
        default="kvflow,NixlConnector",
        metavar="NAME,...",
        help="connectors to compare; `none` when idle, and in the soak; `patched` is kvflow's in a vLLM that begins "
        "with the second token; `NixlConnector+sleep` is NixlConnector in processes that sleep where vLLM spins, as "
        "kvflow's connector makes them while requests move",
    )
    parser.add_argument("--words", type=counts, default="4,60,250,750,1200", metavar="N,...", help="of the prompts")
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="of each length and way, after one to warm up"
    )
    parser.add_argument(
        "--at-once", type=counts, default="16,64", metavar="N,...", help="requests at a time, for throughput"
    )
    parser.add_argument(
        "--loads",
        type=int,
        default=3,
        metavar="N",
        help="of each way, for throughput",
    )
    parser.add_argument("--texts", type=int, default=40, metavar="N", help="prompts to compare, of 5 to 1,500 tokens")
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of the soak, one tenth to warm up")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long to look at idle servers")
    parser.add_argument("--logs", type=Path, metavar="DIRECTORY", help="where logs and traces go; by default a new one")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints.

    Raises:
        ConfigError: An option is unusable, or a package is missing.
    """
    check_positive(arguments, "rounds", "texts", "seconds", "requests", "loads")
    for option, known in (("measures", MEASURES), ("ways", WAYS)):
        unknown = set(getattr(arguments, option)) - set(known)
        if unknown:
            raise ConfigError("no such choice", option=f"--{option}", unknown=sorted(unknown), choices=list(known))
    if "kvflow" not in arguments.ways:
        raise ConfigError("kvflow has to be among the ways", option="--ways")
    check_installed("vllm", "aiohttp")
    return lambda: print_rows(partial(_measure, arguments), is_json=arguments.json)


async def _measure(arguments: argparse.Namespace, on_row: Callable[[Row], None]) -> list[Row]:
    from benchmarks.vllm_handover.client import open_client  # noqa: PLC0415 - its dependencies may be missing
    from benchmarks.vllm_handover.servers import started  # noqa: PLC0415 - as above

    place = arguments.logs or Path(tempfile.mkdtemp(prefix="kvflow-vllm-"))
    place.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        on_row(row)

    most = max(arguments.at_once) if "throughput" in arguments.measures else 1
    async with started(arguments.ways, FIRST_PORT, place, most) as pairs, open_client() as client:
        run = _Run(pairs, client, add)
        if "times" in arguments.measures:
            for words in arguments.words:
                await run.times(words, arguments.rounds)
            run.failures()
        if "texts" in arguments.measures:
            await run.texts(arguments.texts)
            await run.wrong_pages()
        if "idle" in arguments.measures:
            await run.idle(arguments.seconds)
        if "soak" in arguments.measures:
            await run.soak(arguments.requests)
        if "throughput" in arguments.measures:
            for at_once in arguments.at_once:
                await run.throughput(at_once, arguments.loads)
    return rows


class _Run:
    """The measurements, which use the pairs in turn.

    Args:
        pairs: Pairs of servers, the one with kvflow's connector first.
        client: HTTP client for the requests.
        add: Called with each row.
    """

    def __init__(self, pairs: "Sequence[Pair]", client: "aiohttp.ClientSession", add: Callable[[Row], None]) -> None:
        self._all = {pair.way: pair for pair in pairs}
        self._pairs: dict[str, Pair] = {pair.way: pair for pair in pairs if pair.way != "none"}
        self._client = client
        self._add = add
        self._ways = [*self._pairs, *(way for way, pair in OWN.items() if pair in self._pairs)]
        self._failures: dict[str, list[str]] = {way: [] for way in self._ways}
        self._addresses: dict[str, str] = {}

    async def times(self, words: int, rounds: int) -> None:
        """Time handovers of requests of one length, one at a time."""
        found: dict[str, list[dict[str, float]]] = {way: [] for way in self._ways}
        prompt = prompt_of(0, words)
        for way in found:  # the first connects
            await self._timed(way, prompt)
        for way in there_and_back(list(found), rounds):
            found[way].append(await self._timed(way, prompt))
        tokens = (await ask(self._client, self._pairs["kvflow"].urls[0], prompt, 1)).prompt_tokens
        self._compare_patched(f"{tokens} tokens", found)
        at_once = found.pop(AT_ONCE)
        for quantity in (HANDOVER, FIRST_TOKEN):
            facts: dict[str, float | str] = {
                f"{span}, {way}": _ms(found[way], span)
                for way in found
                for span in (*SPANS, *WITHIN_MOVE)
                if any(span in each for each in found[way])
            }
            values = {way: [each[quantity] * 1e3 for each in times] for way, times in found.items()}
            case = f"{tokens} tokens"
            self._row("one request at a time", case, quantity, "ms", values, facts if quantity == HANDOVER else None)
            values["kvflow"] = [each[quantity] * 1e3 for each in at_once]
            self._row(f"the same, {AT_ONCE}", case, quantity, "ms", values)

    def _compare_patched(self, case: str, found: dict[str, list[dict[str, float]]]) -> None:
        """Compare kvflow's connector with and without the patch, and leave only those without it."""
        for way, patched in (("kvflow", found.pop("patched", [])), (AT_ONCE, found.pop(PATCHED_AT_ONCE, []))):
            for quantity in (FIRST_TOKEN, BETWEEN) if patched else ():
                values = {"kvflow": [each[quantity] * 1e3 for each in patched]}
                values["NixlConnector"] = [each[quantity] * 1e3 for each in found[way]]
                self._row(f"prefill's first token, and without ({way})", case, quantity, "ms", values)

    def failures(self) -> None:
        """Report how many of the timed requests failed and were repeated."""
        facts = {f"{way} {number}": text for way, texts in self._failures.items() for number, text in enumerate(texts)}
        measured = Measured(
            bench="vllm_handover",
            group="one request at a time",
            case="all of them",
            quantity="requests that failed",
            unit="requests",
            better="lower",
        )
        counted = {way: [float(len(failures))] for way, failures in self._failures.items()}
        kvflow = counted.pop("kvflow")
        self._add(compare(measured, kvflow, others=counted, facts=facts))  # a ratio would divide by zero

    async def _timed(self, way: str, prompt: str) -> dict[str, float]:
        name = uuid.uuid4().hex
        await anyio.sleep(SPIN_S)
        pair = self._pairs[OWN.get(way, way)]
        first, second = await self._handed_over(way, pair, prompt, name)
        if second is None or second.status != 200 or second.error:
            self._failures[way].append(first.error or (second.error if second is not None else "no ticket"))
            if len(self._failures[way]) > MOST_FAILURES:
                raise BenchFailed("too many requests failed", way=way, details=self._failures[way])
            return await self._timed(way, prompt)
        if way in OWN.values() and first.params is not None:
            self._addresses[way] = f"tcp://{first.params['remote_host']}:{first.params['remote_port']}"
        prefill, decode = (read_events(trace) for trace in pair.traces)
        return spans(name, prefill, decode, (first, second))

    async def _handed_over(self, way: str, pair: "Pair", prompt: str, name: str) -> tuple[Answer, Answer | None]:
        if way in OWN:
            address = self._addresses[OWN[way]]
            return await hand_over_at_once(self._client, *pair.urls, address, prompt, TOKENS, name=name)
        return await hand_over(self._client, *pair.urls, prompt, TOKENS, name=name)

    async def texts(self, count: int) -> None:
        """Compare texts with those of one server alone."""
        asked = prompts(count, 4, MOST_WORDS)
        alone = self._pairs["kvflow"].urls[0]
        expected = {prompt: (await ask(self._client, alone, prompt, TOKENS)).text for prompt in asked}
        for at_once in (1, 4):
            equal: dict[str, list[float]] = {}
            for way, pair in self._pairs.items():
                found = await self._all_texts(pair, asked, at_once)
                equal[way] = [100 * sum(found[prompt] == expected[prompt] for prompt in asked) / count]
            case = f"{count} prompts, {at_once} at a time"
            self._row("texts", case, "equal to those of one server", "%", equal, better="higher")

    async def wrong_pages(self) -> None:
        """Send a wrong page with each request, to prove that the comparison of texts can fail."""
        pair = self._pairs["kvflow"]
        asked = prompts(WRONG, 80, 400)
        expected = {prompt: (await ask(self._client, pair.urls[0], prompt, TOKENS)).text for prompt in asked}
        pair.wrong_page.touch()
        found = await self._all_texts(pair, asked, 1)
        pair.wrong_page.unlink()
        equal = 100 * sum(found[prompt] == expected[prompt] for prompt in asked) / WRONG
        self._row(
            "texts", f"{WRONG} prompts, one wrong page each", "equal to those of one server", "%", {"kvflow": [equal]}
        )

    async def _all_texts(self, pair: "Pair", asked: Sequence[str], at_once: int) -> dict[str, str]:
        slots, found = anyio.Semaphore(at_once), dict[str, str]()

        async def one(prompt: str) -> None:
            async with slots:
                _, answer = await hand_over(self._client, *pair.urls, prompt, TOKENS)
                found[prompt] = "" if answer is None or answer.error else answer.text

        async with open_tasks() as tasks:
            for prompt in asked:
                tasks.start_soon(one, prompt)
        return found

    async def idle(self, seconds: float) -> None:
        """Measure the CPU time of all processes without requests."""
        await anyio.sleep(SETTLE_S)
        before = {way: pair.usage().cpu_s for way, pair in self._all.items()}
        await anyio.sleep(seconds)
        shares: dict[str, list[float]] = {
            way: [100 * (pair.usage().cpu_s - before[way]) / seconds] for way, pair in self._all.items()
        }
        self._row("idle", f"both servers for {seconds:.0f} s", "CPU", "% of a core", shares)

    async def soak(self, requests: int) -> None:
        """Run the soak test on each pair in succession, and report the growth."""
        grown = {way: await soak(pair, self._client, requests) for way, pair in self._all.items()}
        for quantity, unit in grown["kvflow"]:
            values: dict[str, list[float]] = {way: [of_way[quantity, unit]] for way, of_way in grown.items()}
            self._row("soak", f"{requests} requests, 4 at a time, some of which leave", quantity, unit, values)

    async def throughput(self, at_once: int, rounds: int) -> None:
        """Load each pair in turn with twice as many requests as are in flight, after a few to warm up."""
        found: dict[str, list[Load]] = {way: [] for way in self._pairs}
        for pair in self._pairs.values():
            await load(pair, self._client, at_once, range(min(at_once, WARM)))
        for way in there_and_back(list(found), rounds):
            await anyio.sleep(SPIN_S)
            begin = (1 + 2 * len(found[way])) * at_once  # so that no prompt is repeated
            found[way].append(await load(self._pairs[way], self._client, at_once, range(begin, begin + 2 * at_once)))
        group, case = "many requests at a time", f"{at_once} at a time"
        failed = {f"{way} failed": sum(each.failed for each in loads) for way, loads in found.items()}
        rates = {way: [each.rate for each in loads] for way, loads in found.items()}
        self._row(group, case, "answers", "requests/s", rates, failed, better="higher")
        for share in (0.5, 0.99):
            firsts = {way: [1e3 * percentile(each.first_s, share) for each in loads] for way, loads in found.items()}
            self._row(group, case, f"{FIRST_TOKEN}, p{100 * share:.0f}", "ms", firsts)
        cpu_ms = {way: [1e3 * each.cpu_s for each in loads] for way, loads in found.items()}
        self._row(group, case, "CPU time of both servers per request", "ms", cpu_ms)

    def _row(  # noqa: PLR0913 - a row has many columns
        self,
        group: str,
        case: str,
        quantity: str,
        unit: str,
        values: Mapping[str, Sequence[float]],
        facts: Mapping[str, float | str] | None = None,
        *,
        better: Literal["higher", "lower"] = "lower",
    ) -> None:
        measured = Measured(bench="vllm_handover", group=group, case=case, quantity=quantity, unit=unit, better=better)
        others = {way: values[way] for way in values if way not in ("kvflow", "NixlConnector")}
        self._add(
            compare(measured, values["kvflow"], values.get("NixlConnector", ()), others=others, facts=facts or {})
        )


def _ms(found: Sequence[Mapping[str, float]], span: str) -> float:
    """Return the median of a span in milliseconds, over the handovers that have it."""
    return round(statistics.median(each[span] for each in found if span in each) * 1e3, 2)
