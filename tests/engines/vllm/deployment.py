"""A prefill and a decode server, with the requests and checks that tests need."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import aiohttp
import anyio
import msgspec

from benchmarks.vllm_handover.client import MODEL, Answer, ask, metrics
from benchmarks.vllm_handover.plugin import Probe
from kvflow.cli.serve.server import Server
from kvflow.cli.serve.vllm import CPU_ENVIRONMENT, VllmServer, pair, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.support.ports import unused_port

__all__ = ["BROUGHT", "GRANT_S", "KNOWN", "QUIET", "SETTLE_S", "Deployment", "Own", "leave_after", "settled"]

SETTLE_S: Final = 20.0
"""Longer than any failure takes, and shorter than `GRANT_S`: prefill must be notified, not time out."""

GRANT_S: Final = 30.0
"""How long prefill waits for decode's grant."""

QUIET: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Own(NamedTuple):
    """What only one of the two servers has.

    Attributes:
        before: Connectors before kvflow's in a MultiConnector.
        after: Connectors after it.
        arguments: Additional arguments.
        environment: Additional environment variables.
        instead: A connector instead of kvflow's.
    """

    before: Sequence[Mapping[str, Any]] = ()
    after: Sequence[Mapping[str, Any]] = ()
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    instead: Mapping[str, Any] | None = None

    @property
    def others(self) -> list[Mapping[str, Any]]:
        """Connectors other than kvflow's."""
        return [*self.before, *self.after, *([] if self.instead is None else [self.instead])]


class Deployment:
    """Two servers of one model, the small one by default.

    Attributes:
        prefill: Computes prompts. Without `kv_transfer_params`, it answers like any server.
        decode: Continues from the cache of prefill.
        mooncake_port: Port where prefill answers routers of the `mooncake` dialect.
        prefill_address: Address of the first prefill rank.
        wrong_page: While this file exists, prefill sends a page of another request.
        lost_drafts: While this file exists, the caches of a draft model are lost on the way to decode.

    Args:
        own: What only "prefill" has, or only "decode".
        has_both_roles: Each server also does what the other one does.
    """

    def __init__(
        self,
        place: Path,
        *,
        model: Path | None = None,
        extra_config: Mapping[str, Any] | None = None,
        arguments: tuple[str, ...] = (),
        prefill_workers: int = 1,
        divided_by: str = "tensor",
        load_failure_policy: str = "fail",
        own: Mapping[str, Own] | None = None,
        has_both_roles: bool = False,
    ) -> None:
        self.wrong_page, self.lost_drafts = place / "wrong_page", place / "lost_drafts"
        self.mooncake_port, port = unused_port(), unused_port()
        self.prefill_address = f"tcp://127.0.0.1:{port}"
        others = [it["kv_connector"] for here in (own or {}).values() for it in here.others]
        probe = Probe(
            wrong_page=str(self.wrong_page),
            lost_drafts=str(self.lost_drafts),
            eases_nixl="NixlConnector" in others,
        ).environment()
        described = pair(
            model=str(model or prepare_smollm2()),
            served_name=MODEL,
            first_port=0,
            extra_config={
                "port": port,
                **({} if divided_by == "data" else {"mooncake_port": self.mooncake_port}),
                **(extra_config or {}),
            },
            arguments=arguments,
            is_cpu=True,
        )
        prefill, decode = described
        policy = {"kv_load_failure_policy": load_failure_policy}
        decode = msgspec.structs.replace(decode, connector={**decode.connector, **policy})
        if has_both_roles:
            prefill = msgspec.structs.replace(prefill, connector={**prefill.connector, **policy}, role="kv_both")
            decode = msgspec.structs.replace(decode, role="kv_both")

        def make(server: VllmServer) -> Server:
            here = (own or {}).get(server.name, Own())
            described = msgspec.structs.replace(
                server,
                port=unused_port(),
                connector=_together(server, here) if here.others else server.connector,
                arguments=(*server.arguments, *here.arguments),
                environment={**server.environment, **QUIET, **probe, **here.environment},
            )
            return vllm_server(described, place)

        self.prefill, self.decode = make(_with_workers(prefill, prefill_workers, divided_by)), make(decode)
        self._texts: dict[tuple[str, int], str] = {}

    def __enter__(self) -> Self:
        """Start both servers, and wait until they are ready."""
        with ExitStack() as stack:
            stack.callback(self.stop)
            self.prefill.start()
            self.decode.start()
            anyio.run(self.wait_until_ready)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def wait_until_ready(self) -> None:
        """Wait until both servers are ready."""
        await self.prefill.wait_until_ready()
        await self.decode.wait_until_ready()

    def stop(self) -> None:
        """Stop both servers, whatever state they are in."""
        self.prefill.stop()
        self.decode.stop()

    async def text(self, client: aiohttp.ClientSession, prompt: str, tokens: int) -> str:
        """Return the text of a single server."""
        if (prompt, tokens) not in self._texts:
            answer = await ask(client, self.prefill.url, prompt, tokens)
            assert answer.status == 200, answer.error
            self._texts[prompt, tokens] = answer.text
        return self._texts[prompt, tokens]

    async def until_free(self, client: aiohttp.ClientSession, within_s: float = SETTLE_S) -> None:
        """Wait until neither server has a request or a block in use."""
        for server in (self.prefill, self.decode):
            await settled(client, server, lambda found: not any(found[name] for name in IN_USE), within_s)

    async def hands_over(self, client: aiohttp.ClientSession, url: str, prompt: str, tokens: int = 8) -> None:
        """Check that a router returns the text of a single server, and that decode did not recompute the prompt."""
        before = await metrics(client, self.decode.url)
        answer = await ask(client, url, prompt, tokens, stream=True)
        assert (answer.status, answer.error) == (200, "")
        assert answer.text == await self.text(client, prompt, tokens)
        after = await metrics(client, self.decode.url)
        assert after[BROUGHT] + after[KNOWN] - before[BROUGHT] - before[KNOWN] > 0


def _together(server: VllmServer, own: Own) -> dict[str, Any]:
    """Put a server's connector and others into one MultiConnector, unless another one replaces it."""
    policy = {"kv_load_failure_policy": server.connector.get("kv_load_failure_policy", "fail")}
    if own.instead is not None:
        return {**own.instead, **policy}
    connectors = [*own.before, {**server.connector, "kv_role": server.role}, *own.after]
    return {"kv_connector": "MultiConnector", **policy, "kv_connector_extra_config": {"connectors": connectors}}


def _with_workers(server: VllmServer, count: int, divided_by: str) -> VllmServer:
    """Let workers share the heads (`tensor`) or requests (`data`), each on a CPU of its own while there are enough."""
    if count == 1:
        return server
    cpus = sorted(os.sched_getaffinity(0))
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpus[number % len(cpus)]) for number in range(count))}
    return msgspec.structs.replace(
        server,
        cpus=None,
        arguments=(*server.arguments, f"--{divided_by}-parallel-size", str(count)),
        environment={**server.environment, **CPU_ENVIRONMENT, **binding, "OMP_NUM_THREADS": "1"},
    )


IN_USE: Final = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
BROUGHT: Final = "external_prefix_cache_hits_total"
KNOWN: Final = "prefix_cache_hits_total"


async def settled(
    client: aiohttp.ClientSession, server: Server, is_so: Callable[[dict[str, float]], bool], within_s: float = SETTLE_S
) -> None:
    """Wait until a server's metrics have the expected values."""
    found: dict[str, float] = {}
    with anyio.move_on_after(within_s):
        while True:
            found = await metrics(client, server.url)
            if is_so(found):
                return
            await anyio.sleep(0.1)
    in_use = {name: found.get(name) for name in IN_USE}
    raise AssertionError(f"{server.name} still has {in_use}\n{server.tail()}")


async def leave_after(seconds: float, call: Callable[[], Any]) -> Answer | None:
    """Make a call, and close the connection after a while; return the answer if it comes first."""
    with suppress(aiohttp.ClientError), anyio.move_on_after(seconds):
        answer: Answer = await call()
        return answer
    return None
