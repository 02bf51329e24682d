"""A prefill and a decode process with a registry between them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import structs

import kvflow
from benchmarks.processes import ANSWER_S, ChildProcess
from kvflow.cli.tasks import open_tasks
from kvflow.keys import add_peer, add_registry, make_keys

__all__ = ["DECODE", "PREFILL", "SideName", "SideOptions", "WrongBytes", "make_all_keys", "open_sides"]

SideName = Literal["prefill", "decode"]

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Names of the two instances."""

REGISTRY: Final = "registry"


def make_all_keys(directory: Path) -> None:
    """Create keys for the registry and for both instances, which trust each other."""
    names = (REGISTRY, PREFILL, DECODE)
    keys = {name: make_keys(directory / name) for name in names}
    for name in names:
        for one in (PREFILL, DECODE):
            add_peer(directory / name, keys[one], one)
        add_registry(directory / name, keys[REGISTRY])


class SideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of both processes.

    Attributes:
        side: Instance of the process.
        registry: Address of the registry.
        backend: Transport between the processes.
        keys: Directory with a key directory for each side; no keys if None.
    """

    side: SideName = PREFILL
    registry: str = ""
    backend: str = "nixl"
    keys: str | None = None

    @property
    def trust(self) -> kvflow.Trust | None:
        """Keys of this side; None if there are none."""
        return None if self.keys is None else kvflow.load_trust(f"{self.keys}/{self.side}")


AnySideOptions = TypeVar("AnySideOptions", bound=SideOptions)


class WrongBytes(kvflow.KvflowError):
    """The received bytes differ from those sent, so all figures of this run are worthless."""


@asynccontextmanager
async def open_sides(
    options: AnySideOptions, module: str, answer_s: float = ANSWER_S
) -> AsyncIterator[tuple[ChildProcess, ChildProcess]]:
    """Start a registry and both processes, and end them on exit.

    Args:
        options: Options of both; side and registry are filled in.
        module: Module that the processes run.
        answer_s: Maximum time for an expected report.

    Yields:
        Prefill and decode. Each reports `ready` when its ranks are open.

    Raises:
        ChildFailed: A process hangs, or ended with an error or with output on its standard error.
    """
    trust = None if options.keys is None else kvflow.load_trust(f"{options.keys}/{REGISTRY}")
    async with kvflow.Registry(trust=trust) as registry, open_tasks() as tasks, AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(
                ChildProcess(
                    side,
                    module,
                    structs.replace(options, side=side, registry=registry.endpoint),
                    tasks,
                    answer_s=answer_s,
                )
            )
            for side in (PREFILL, DECODE)
        ]
        yield prefill, decode
