"""Both processes of a measurement, with a registry between them."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from msgspec import structs

import kvflow
from kvflow.cli.bench.workers.options import DECODE, PREFILL, AnyOptions
from kvflow.cli.bench.workers.process import ANSWER_S, WorkerProcess
from kvflow.errors import KvflowError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

__all__ = ["WrongBytes", "open_sides"]


class WrongBytes(KvflowError):
    """What has arrived is not what was sent: nothing that was measured is worth anything."""


@asynccontextmanager
async def open_sides(
    options: AnyOptions, module: str, answer_s: float = ANSWER_S
) -> AsyncIterator[list[WorkerProcess[AnyOptions]]]:
    """Start a registry and both processes, prefill first, and end them on exit.

    Args:
        options: Of both; side and registry are filled in.
        module: What the processes run.
        answer_s: How long they may take to say what is expected of them.

    Raises:
        WorkerFailed: A process hangs, or ended with an error or with something on its standard error.
    """
    try:
        async with kvflow.Registry() as registry, anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            workers = []
            for side in (PREFILL, DECODE):
                own = structs.replace(options, side=side, registry=registry.endpoint)
                workers.append(await stack.enter_async_context(WorkerProcess(own, tasks, module, answer_s)))
            for worker in workers:
                await worker.expect_ready()
            yield workers
    except BaseExceptionGroup as group:  # what went wrong first; the rest is what it brought down
        raise group.exceptions[0] from group
