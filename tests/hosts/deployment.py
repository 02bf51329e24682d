"""A registry, a prefill rank and a decode rank on two hosts under steady load, and the outcome of each request.

The harness plays the request router: like clients, it sends each request to both workers at a steady rate, whatever
they answer. It talks to them through pipes, which network faults do not affect.
"""

import contextlib
import io
import logging
import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from tests.hosts import lines
from tests.hosts.hosts import HOST_NAMES, Host, TwoHosts, pipe
from tests.hosts.worker import PREFILL, Settings

__all__ = ["CONTROL_PORT", "REGISTRY_PORT", "Deployment", "Process", "WorkerFailed"]

REGISTRY_PORT: Final = 7100
CONTROL_PORT: Final = 7200

NEIGHBOUR: Final = "neighbour"
"""Name of the second prefill instance, if there is one."""

NO_END: Final = "no end"
"""Outcome of a room that decode has not reported."""

LOOK_S: Final = 0.05

START_S: Final = 60.0
"""How long a worker may take to start on a busy machine."""

FIRST_REQUEST_S: Final = 30.0
"""How long the first successful request may take."""

AnyReport = TypeVar("AnyReport", bound=lines.Report)


class WorkerFailed(Exception):
    """A worker exited, or did not send an expected report; the message has the end of its log."""


class Process:
    """A worker on a host.

    Args:
        host: Where it runs.
        settings: Its role and options.
        log: File to which its log is appended.

    Attributes:
        reports: Its reports so far; only ever grows.
    """

    def __init__(self, host: Host, settings: Settings, log: Path) -> None:
        self.role, self.instance = settings.role, settings.instance
        self.reports: list[lines.Report] = []
        self._num_sent = self._num_ended = 0
        self._log = log
        self._news = threading.Condition()
        self._ordering = threading.Lock()
        command = [sys.executable, "-m", "tests.hosts.worker", msgspec.json.encode(settings).decode()]
        with log.open("a", encoding="utf-8") as stream:
            self._process = host.spawn(command, stderr=stream.fileno())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, command: lines.Command) -> None:
        """Send a command; without effect if the worker has exited."""
        self._write(msgspec.json.encode(command).decode())

    def send(self, room: int) -> None:
        """Send it a room to serve."""
        self._num_sent += 1
        self.order(lines.Room(room))

    @property
    def num_open(self) -> int:
        """Rooms that were sent to it, and whose end it has not reported."""
        return self._num_sent - self._num_ended

    def begin(self) -> None:
        """Make a worker with `is_prepared` open its rank."""
        self._write("begin")

    def _write(self, line: str) -> None:
        stream = pipe(self._process.stdin)
        with self._ordering, contextlib.suppress(BrokenPipeError):
            if not stream.closed:
                stream.write(f"{line}\n")
                stream.flush()

    def of(self, kind: type[AnyReport]) -> list[AnyReport]:
        """Return the reports of one kind so far."""
        return [report for report in list(self.reports) if isinstance(report, kind)]

    def wait_for(
        self, kind: type[AnyReport], timeout_s: float = START_S, *, where: Callable[[AnyReport], bool] = lambda _: True
    ) -> AnyReport:
        """Wait until there is a matching report, and return the first.

        Raises:
            WorkerFailed: There is none in time.
        """

        def found() -> AnyReport | None:
            return next((report for report in self.of(kind) if where(report)), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), timeout_s)
        report = found()
        if report is None:
            raise WorkerFailed(f"{self.role} did not report {kind.__name__} within {timeout_s} s\n{self._log_tail()}")
        return report

    def kill(self) -> None:
        """Kill the process with SIGKILL, as the kernel's OOM killer does."""
        self._process.kill()
        self._end()

    def suspend(self) -> None:
        """Stop the process with SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        self._process.send_signal(signal.SIGCONT)

    def close(self, timeout_s: float = 30.0) -> lines.Closed:
        """Make the worker close its rank in an orderly way, and exit.

        Raises:
            WorkerFailed: It does not do so in time.
        """
        self.order(lines.Close())
        try:
            return self.wait_for(lines.Closed, timeout_s)
        finally:
            self.kill()

    def _end(self) -> None:
        self._process.wait()
        self._reader.join()
        with self._ordering, contextlib.suppress(BrokenPipeError):
            pipe(self._process.stdin).close()
        pipe(self._process.stdout).close()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(lines.Report)
        for line in pipe(self._process.stdout):
            report = decoder.decode(line)
            self.reports.append(report)
            self._num_ended += isinstance(report, lines.Ended)
            with self._news:
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text("utf-8").splitlines()[-20:])


class Router:
    """A thread that sends requests to workers at a steady rate.

    Args:
        rate: Requests a second.

    Attributes:
        workers: Workers that receive each request.
        sent: When each room was sent.
        rate: As above; may be changed.
        max_open: No request is sent while a worker has this many that have not ended.
    """

    def __init__(self, rate: float) -> None:
        self.workers: list[Process] = []
        self.sent: dict[int, float] = {}
        self.rate = rate
        self.max_open: float = math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; no request is sent after this."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        room = 0
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += 1.0 / self.rate
            workers = self.workers
            if any(worker.num_open >= self.max_open for worker in workers):
                continue
            room += 1
            self.sent[room] = time.monotonic()
            for worker in workers:
                worker.send(room)


class Deployment:
    """Network, workers and load. Use it as a context manager; on entry the first request has succeeded.

    Args:
        logs: Folder for the logs of the workers.
        backend: Transport of both ranks.
        rate: Requests a second.
        is_ipv6: The hosts have IPv6 addresses only.
        by_name: Endpoints contain host names, not addresses.
        registry_on: Host of the registry, "a" or "b". Prefill is on A and decode on B.
        backend_options: Options of the transport on both sides, besides those that two hosts need.
        needs_options: Pass Mooncake the address of its host.
        has_neighbour: Another prefill instance on the same host serves every other room.
        log_level: Level of the workers' logs.
        clocks_apart_s: By how much the monotonic clock of A is ahead of that of B. Times in reports from A are, too.

    Attributes:
        net: The network and its faults.
        router: The load.
    """

    prefill: Process
    decode: Process

    def __init__(
        self,
        logs: Path,
        *,
        backend: str = "nixl",
        rate: float = 20.0,
        is_ipv6: bool = False,
        by_name: bool = False,
        registry_on: str = "a",
        backend_options: Mapping[str, Any] | None = None,
        needs_options: bool = True,
        has_neighbour: bool = False,
        log_level: int = logging.INFO,
        clocks_apart_s: int = 0,
    ) -> None:
        self.net = TwoHosts(is_ipv6=is_ipv6)
        self._clocks_apart_s = clocks_apart_s
        self.router = Router(rate)
        self.backend = backend
        self.rate = rate
        self.faults: list[tuple[float, str]] = []
        self._logs = logs
        self._by_name = by_name
        self._registry_on = registry_on
        self._options = dict(backend_options or {})
        self._needs_options = needs_options
        self._instances = (PREFILL, NEIGHBOUR) if has_neighbour else (PREFILL,)
        self._log_level = log_level
        self._processes: list[Process] = []
        self._resources = ExitStack()

    def __enter__(self) -> "Deployment":
        with ExitStack() as undo:
            undo.enter_context(self.net)
            undo.callback(self._kill_all)
            self.net.a.clock_ahead_s = self._clocks_apart_s
            self.start_registry()
            self.start_prefill()
            for number, name in enumerate(self._instances[1:], 1):
                bind, advertise = self._listen("a", CONTROL_PORT + number)
                settings = Settings(
                    role="prefill", instance=name, bind=bind, advertise=advertise, **self._rank_settings("a")
                )
                self._start("a", settings)
            self.start_decode()
            undo.callback(self.router.stop)
            self.router.start()
            self.decode.wait_for(lines.Ended, FIRST_REQUEST_S, where=lambda ended: ended.reason == lines.SUCCESS)
            self._resources = undo.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    # Workers --------------------------------------------------------------------------------------------------------

    def start_registry(self) -> Process:
        """Start the registry on its host."""
        bind, advertise = self._listen(self._registry_on, REGISTRY_PORT)
        return self._start(
            self._registry_on, Settings(role="registry", bind=bind, advertise=advertise, log_level=self._log_level)
        )

    def prepare_prefill(self) -> Process:
        """Start a process on host A that can replace prefill at once."""
        bind, advertise = self._listen("a", CONTROL_PORT)
        settings = Settings(
            role="prefill", bind=bind, advertise=advertise, is_prepared=True, **self._rank_settings("a")
        )
        process = self._spawn("a", settings)
        process.wait_for(lines.Prepared)
        return process

    def start_prefill(self, prepared: Process | None = None) -> Process:
        """Start a prefill worker on host A, always on the same port, and send it requests from now on."""
        self.prefill = prepared or self.prepare_prefill()
        self.prefill.begin()
        self.prefill.wait_for(lines.Opened)
        self._route()
        return self.prefill

    def start_decode(self) -> Process:
        """Start a decode worker on host B, and send it requests from now on."""
        self.decode = self._start("b", Settings(role="decode", num_lanes=256, **self._rank_settings("b")))
        self._route()
        return self.decode

    def _start(self, side: str, settings: Settings) -> Process:
        process = self._spawn(side, settings)
        process.wait_for(lines.Opened)
        return process

    def _spawn(self, side: str, settings: Settings) -> Process:
        name = settings.instance if settings.role == PREFILL else settings.role
        process = Process(self.net.host(side), settings, self._logs / f"{name}.log")
        self._processes.append(process)
        return process

    def _route(self) -> None:
        ranks = [process for process in self._processes if process.role in {"prefill", "decode"}]
        self.router.workers = list({(process.role, process.instance): process for process in ranks}.values())

    def _rank_settings(self, side: str) -> dict[str, Any]:
        options = dict(self._options)
        if self.backend == "mooncake" and self._needs_options:
            options["host"] = self.net.host(side).address
        registry = f"tcp://{self._url_host(self._registry_on)}:{REGISTRY_PORT}"
        shared = {"registry": registry, "log_level": self._log_level, "instances": self._instances}
        return shared | {"backend": self.backend, "backend_options": options}

    def _listen(self, side: str, port: int) -> tuple[str, str | None]:
        if not self._by_name:
            return f"tcp://{self.net.host(side).url_host}:{port}", None
        wildcard = "[::]" if ":" in self.net.host(side).address else "*"
        return f"tcp://{wildcard}:{port}", HOST_NAMES[side]

    def _url_host(self, side: str) -> str:
        return HOST_NAMES[side] if self._by_name else self.net.host(side).url_host

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()

    # Time -----------------------------------------------------------------------------------------------------------

    def mark(self, what: str) -> float:
        """Add a line to the table for something that happens now, and return the time."""
        at = time.monotonic()
        self.faults.append((at, what))
        return at

    def run(self, seconds: float) -> None:
        """Keep up the load for some time."""
        threading.Event().wait(seconds)

    def run_until(self, at: float) -> None:
        """Keep up the load until a point in time."""
        self.run(max(0.0, at - time.monotonic()))

    def run_until_ended(self, since: float, until: float, within_s: float) -> None:
        """Keep up the load until `until`, and then until each request since `since` has ended or is overdue."""
        self.run_until(until)
        while time.monotonic() < until + within_s and NO_END in self.unserved(since, until, within_s).values():
            self.run(LOOK_S)

    # Outcomes -------------------------------------------------------------------------------------------------------

    def ended(self) -> dict[int, lines.Ended]:
        """Return how each room ended on decode, without rooms that have not ended."""
        processes = [process for process in self._processes if process.role == "decode"]
        return {ended.room: ended for process in processes for ended in process.of(lines.Ended)}

    def unserved(self, since: float, until: float, within_s: float) -> dict[int, str]:
        """Return the rooms sent from `since` to `until` that were not served within `within_s`, and their outcomes."""
        ended = self.ended()
        found = {}
        for room, sent_at in self.router.sent.copy().items():  # in one step: the router's thread adds rooms
            end = ended.get(room)
            if not since <= sent_at < until:
                continue
            if end is None:
                found[room] = NO_END
            elif end.reason != lines.SUCCESS:
                found[room] = end.reason
            elif end.at - sent_at > within_s:
                found[room] = f"late by {end.at - sent_at - within_s:.1f} s"
        return found

    def recovered_after(self, healed_at: float, until: float, within_s: float) -> float:
        """Return the seconds from the heal to the last unserved request that was sent before `until`."""
        unserved = self.unserved(healed_at, until, within_s)
        return max((self.router.sent[room] - healed_at for room in unserved), default=0.0)

    def wrong(self) -> list[str]:
        """Return every wrong success and every write to safe pages; empty if kvflow kept its promises."""
        found = [
            f"room {room} has wrong pages" for room, end in self.ended().items() if end.reason == lines.WRONG_PAGES
        ]
        found += [
            f"{process.role}: pages last of room {report.room} changed although they were given back"
            for process in self._processes
            for report in process.of(lines.Trespassed)
        ]
        return found

    def is_quiet(self, process: Process, since: float, timeout_s: float) -> bool:
        """Wait until, after `since`, all pages of ended rooms are safe; return False on timeout."""
        try:
            process.wait_for(lines.Second, timeout_s, where=lambda second: second.at > since and not second.held_pages)
        except WorkerFailed:
            return False
        return True

    def table(self) -> str:
        """Format the run, one line a second: successes, failures by reason, pages in quarantine."""
        text = io.StringIO()
        text.write(f"{self.backend}, {self.rate:g} requests/s\n")
        text.write("            prefill: pages            decode: pages\n")
        text.write("     s    ok   held quar. rooms waiting; the same   failed on decode; on prefill\n")
        start = min(self.router.sent.values(), default=0.0)
        for at, line in sorted([*self._second_lines(), *((at, f"---- {what}") for at, what in self.faults)]):
            text.write(f"{at - start:6.1f} {line}\n")
        return text.getvalue()

    def _second_lines(self) -> Iterator[tuple[float, str]]:
        seconds = {"prefill": list[lines.Second](), "decode": list[lines.Second]()}
        for process in self._processes:
            seconds.get(process.role, []).extend(process.of(lines.Second))
        prefill, decode = seconds.values()
        for second in decode:
            other = max((it for it in prefill if it.at <= second.at), key=lambda it: it.at, default=None)
            sides = "  ".join(_stock(it) for it in (other, second) if it is not None)
            failed = "; ".join(_counts(it.failures) for it in (second, other) if it is not None)
            yield second.at, f"{second.successes:5d}  {sides}  {failed}"

    def totals(self) -> str:
        """Format the number of rooms by outcome."""
        return _counts(Counter(ended.reason for ended in self.ended().values()))


def _stock(second: lines.Second) -> str:
    return f"{second.held_pages:5d} {second.quarantined_pages:5d} {second.waiting:5d}"


def _counts(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in sorted(counts.items())) or "-"
