"""A prefill process that sends all but the last blocks of a request, and then hangs until it is killed."""

import sys
import threading
from typing import Any

import msgspec

import kvflow
from benchmarks.processes import Line, run_child
from kvflow.engines.transformers.prefill import PrefillManager
from tests.engines.transformers.models import make_manager

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True):
    """Options of the process.

    Attributes:
        prompts: Prompts by room.
        fingerprint: Fingerprint of decode's cache.
    """

    prompts: dict[str, list[int]]
    fingerprint: str


def _serve(options: Options, line: Line) -> None:
    manager = make_manager()
    config = kvflow.PrefillConfig(instance="prefill", backend="nixl")
    with PrefillManager(manager, config, fingerprint=options.fingerprint) as end:

        def hang(*_: Any) -> None:
            """Hang in the middle: decode has granted its pages and received a part."""
            while any(one.sender.wanted is None for one in sent.values()) or not _num_posts(end):
                end.rank.wait_any(0.01)
            line.report("hangs")
            threading.Event().wait()

        end._finish = hang  # type: ignore[method-assign, assignment]
        sent = {room: end.add_request(prompt, room) for room, prompt in options.prompts.items()}
        line.report("tickets", tickets={room: one.ticket for room, one in sent.items()})
        manager.start()
        line.receive()


def _num_posts(end: PrefillManager) -> int:
    counts = end.rank.statistics().staging
    return counts.direct_posts + counts.packed_posts


if __name__ == "__main__":
    sys.exit(run_child(_serve, Options))
