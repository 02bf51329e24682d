"""The world: processes, network and transport with one clock and one source of chance."""

import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio

from kvflow.directory import Registry
from kvflow.errors import ThreadShortage
from kvflow.ports import Ports
from simulation.dataplane import DataPlane, SimulatedBackend
from simulation.faults import NO_FAULTS, Faults
from simulation.loop import Process, VirtualLoop
from simulation.network import Network, SimulatedChannel

__all__ = ["REGISTRY", "World"]

Result = TypeVar("Result")

REGISTRY = "tcp://127.0.0.1:7100"

CLOCKS_APART_S: Final = 3_600.0
"""By how much the monotonic clocks of the hosts differ, one after another: each has started with its host."""
"""Endpoint of the registry of a world, once it has been started."""

THREAD_S = 0.002
"""Maximum duration of work in a thread, apart from waits for a device."""

SLOW_THREAD_S = 0.3
"""Maximum additional duration of a slow one."""


class World:
    """Processes in virtual time. Use it as a context manager.

    Args:
        seed: Determines everything that is drawn.
        faults: Faults to inject; can be changed at any time.
        ends_with_process: No bytes of a process land after its end.
        in_band_notices: The transport has in-band notices.
        shows_last_bytes: An endpoint can tell when the last bytes of a dead process have landed.
        tells: Keep a story.

    Attributes:
        loop: The event loop of all processes.
        rng: Source of everything that is drawn.
        network: Carries messages.
        plane: Carries writes.
        processes: The latest process of each name.
        pace: Factor on the duration of quick operations.
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
        self._clocks: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.now

    def start(
        self, name: str, main: Callable[[Process], Coroutine[Any, Any, object]], *, host: str | None = None
    ) -> Process:
        """Start a process.

        Args:
            name: Name of the process. It may be that of a process that has ended.
            main: What it runs; the process ends when this returns.
            host: Host that it runs on; by default one of its own, with the same name.
        """
        process = Process(self.loop, name, host or name)
        self.processes[name] = process
        process.when_dead(lambda: self._ended(process))
        self.tell(f"{name} starts")
        return process.start(lambda: main(process))

    def start_registry(self, endpoint: str = REGISTRY) -> Process:
        """Start an empty registry in a process of its own."""

        async def serve(process: Process) -> None:
            async with Registry(bind=endpoint, ports=self.ports(process)):
                await anyio.sleep_forever()

        return self.start("registry", serve)

    def ports(self, process: Process) -> Ports:
        """Return the ports that connect a rank in a process to this world."""
        rng = random.Random(self.rng.getrandbits(64))  # noqa: S311 - as above
        clock = self._clocks.setdefault(process.host, CLOCKS_APART_S * len(self._clocks))

        def run_in_thread(function: Callable[[], Result], /, *, abandon_on_cancel: bool = False) -> Awaitable[Result]:
            return self._run_in_thread(process, function, is_awaited=not abandon_on_cancel)

        return Ports(
            control=SimulatedChannel(self.network, process),
            now=lambda: process.now() + clock,
            run_in_thread=run_in_thread,
            random_bytes=rng.randbytes,
            unix_time=process.now,
        )

    def backend(self, process: Process, mapped: Mapping[int, bytearray] | None = None) -> SimulatedBackend:
        """Return a transport for a rank in a process.

        Args:
            process: The process of the rank.
            mapped: Memory that the layout places at made-up addresses, by address; all other memory is real.
        """
        return SimulatedBackend(self.plane, process, mapped)

    def run(self, lasts_s: float) -> None:
        """Advance virtual time by some seconds.

        Raises:
            Violation: An exception was not caught, or a promise was found broken.
        """
        self.loop.advance(lasts_s)

    def pause(self, process: Process, *, stalls: bool = True, stops_clock: bool = False) -> None:
        """Pause a process; arguments as in `Process.pause`."""
        self.tell(f"{process} {'STOPPED' if stalls else 'BLOCKED'}{' with its clock' if stops_clock else ''}")
        process.pause(stalls=stalls, stops_clock=stops_clock)
        self.network.process_stopped(process)

    def resume(self, process: Process) -> None:
        """Resume a paused process."""
        if process.is_alive and not process.is_running:
            self.tell(f"{process} goes on")
            process.resume()

    def heal(self) -> None:
        """Inject no more faults, mend every cut link, and resume every paused process."""
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
        """End all processes and close the event loop."""
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

    async def _run_in_thread(self, process: Process, function: Callable[[], Result], *, is_awaited: bool) -> Result:
        if self.faults.no_thread and self.rng.random() < self.faults.no_thread:
            self.count("no thread")
            raise ThreadShortage("cannot start a thread")
        delay_s = THREAD_S * self.pace * self.rng.random()
        if self.faults.slow_thread and self.rng.random() < self.faults.slow_thread:
            self.count("slow thread")
            delay_s += SLOW_THREAD_S * self.rng.random()
        running = process.run_in_thread(function, delay_s)
        with anyio.CancelScope(shield=is_awaited) as scope:
            return await running
        raise RuntimeError("a shielded wait was cancelled", scope)
