"""Everything together: processes, network and transport on one clock and one source of chance."""

import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from kvflow.directory import Registry
from kvflow.errors import ThreadShortage
from kvflow.ports import Ports
from kvflow.testing.simulation.dataplane import DataPlane, SimulatedBackend
from kvflow.testing.simulation.faults import NO_FAULTS, Faults
from kvflow.testing.simulation.loop import Process, VirtualLoop
from kvflow.testing.simulation.network import Network, SimulatedChannel

__all__ = ["REGISTRY", "World"]

Result = TypeVar("Result")

REGISTRY = "tcp://127.0.0.1:7100"
"""Where the registry of a world is, once it was started."""

THREAD_S = 0.002
"""How long work in a thread takes, at most; it waits as long as a device takes."""


class World:
    """Processes in virtual time. Use it as a context manager.

    Args:
        seed: Decides everything that is drawn.
        faults: What goes wrong by chance; it can be changed at any time.
        ends_with_process: The transport lands nothing any more once the process that wrote has ended.
        in_band_notices: The transport has in-band notices.
        tells: Keep a story.

    Attributes:
        loop: Runs everything.
        rng: Draws everything.
        network: Carries messages.
        plane: Carries writes.
        processes: The latest process of each name.
        pace: How long what is quick takes, in multiples of what it usually takes.
        injected: Faults so far, by kind.
        story: What has happened, line by line, if it is kept.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        faults: Faults = NO_FAULTS,
        ends_with_process: bool = False,
        in_band_notices: bool = True,
        shows_last_bytes: bool = False,
        tells: bool = False,
    ) -> None:
        self.loop = VirtualLoop()
        self.rng = random.Random(seed)  # noqa: S311 - chance must be repeatable here
        self.faults = faults
        self.pace = 1.0
        self.injected: dict[str, int] = {}
        self.story: list[str] | None = [] if tells else None
        self.network = Network(self)
        self.plane = DataPlane(
            self,
            ends_with_process=ends_with_process,
            in_band_notices=in_band_notices,
            shows_last_bytes=shows_last_bytes,
        )
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.loop.now

    def start(
        self, name: str, main: Callable[[Process], Coroutine[Any, Any, object]], *, host: str | None = None
    ) -> Process:
        """Start a process.

        Args:
            name: Of the process. A later one may have the name of one that has ended.
            main: What it runs; it ends when this returns.
            host: Where it runs: by default on a host of its own, which has the same name.
        """
        process = Process(self.loop, name, host or name)
        self.processes[name] = process
        process.when_dead(lambda: self._ended(process))
        self.tell(f"{name} starts")
        return process.start(lambda: main(process))

    def start_registry(self, endpoint: str = REGISTRY) -> Process:
        """Start a registry in a process of its own, with nobody in it."""

        async def serve(process: Process) -> None:
            async with Registry(bind=endpoint, ports=self.ports(process)):
                await anyio.sleep_forever()

        return self.start("registry", serve)

    def ports(self, process: Process) -> Ports:
        """The ports through which a rank in a process meets this world."""
        rng = random.Random(self.rng.getrandbits(64))  # noqa: S311 - as above

        def run_in_thread(function: Callable[[], Result]) -> Awaitable[Result]:
            return self._run_in_thread(process, function)

        return Ports(
            control=SimulatedChannel(self.network, process),
            now=process.now,
            run_in_thread=run_in_thread,
            random_bytes=rng.randbytes,
            unix_time=process.now,
        )

    def backend(self, process: Process, mapped: Mapping[int, bytearray] | None = None) -> SimulatedBackend:
        """A transport for a rank in a process.

        Args:
            process: Whose rank it is.
            mapped: Memory that the layout has at made-up addresses, by address; all other memory is real.
        """
        return SimulatedBackend(self.plane, process, mapped)

    def run(self, lasts_s: float) -> None:
        """Let some virtual seconds pass.

        Raises:
            Violation: An exception was caught by nobody, or somebody has found a promise broken.
        """
        self.loop.advance(lasts_s)

    def pause(self, process: Process, *, stalls: bool = True, stops_clock: bool = False) -> None:
        """Stop a process; arguments as in `Process.pause`."""
        self.tell(f"{process} {'STOPPED' if stalls else 'BLOCKED'}{' with its clock' if stops_clock else ''}")
        process.pause(stalls=stalls, stops_clock=stops_clock)
        self.network.process_stopped(process)

    def resume(self, process: Process) -> None:
        """Let a stopped process go on."""
        if process.is_alive and not process.is_running:
            self.tell(f"{process} goes on")
            process.resume()

    def heal(self) -> None:
        """Let nothing go wrong any more, mend what is cut, and let every stopped process go on."""
        self.faults = NO_FAULTS
        self.network.heal()
        self.plane.hasten()
        for process in list(self.processes.values()):
            self.resume(process)

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        if self.story is not None:
            self.story.append(f"{self.loop.now:9.4f}  {text}")

    def count(self, kind: str) -> None:
        """Count a fault."""
        self.injected[kind] = self.injected.get(kind, 0) + 1
        if self.story is not None:
            self.tell(f"  fault: {kind}")

    def close(self) -> None:
        """End everything."""
        self.story, story = None, self.story
        for process in self.processes.values():
            process.end()
        self.loop.close()
        self.story = story

    def _ended(self, process: Process) -> None:
        how = "vanishes" if process.has_vanished else "ends"
        self.tell(f"{process} {how}{'' if process.exit is None else f': {process.exit!r}'}")
        self.network.process_ended(process)
        self.plane.process_ended(process)

    async def _run_in_thread(self, process: Process, function: Callable[[], Result]) -> Result:
        if self.faults.no_thread and self.rng.random() < self.faults.no_thread:
            self.count("no thread")
            raise ThreadShortage("cannot start a thread")
        running = process.run_in_thread(function, THREAD_S * self.pace * self.rng.random())
        with anyio.CancelScope(shield=True) as scope:
            return await running
        raise RuntimeError("a shielded wait was cancelled", scope)
