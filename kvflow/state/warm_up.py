"""Warm-ups, which run the code of a transfer shortly before it is needed. Pure.

Code that has not run for some ten milliseconds takes three to four times as long as usual, because a processor that
sleeps or does other work evicts it from its caches. So while a room waits for its last chunk, its rank may rehearse the
next steps with a throwaway core (`warm_up_core` of both cores).
"""

from typing import Final

from msgspec.structs import replace

from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, first_page
from kvflow.wire.messages import Grant

__all__ = ["WARM_UP_ROOM", "first_page_of"]

WARM_UP_ROOM: Final = 2**63 - 1
"""The room of a warm-up, which never leaves the throwaway core. While an engine uses this id, there are no warm-ups."""


def first_page_of(grant: Grant, layout: KVLayout) -> Grant:
    """Return a grant for the first page of another one, with the same destination.

    Args:
        grant: Grant of a decode rank.
        layout: Layout of that decode rank.
    """
    known = layout.by_name
    parts = {
        name: first_page(tokens, known[name])
        for name, tokens in grant.ranges.items()
        if name in known and name in grant.pages
    }
    return replace(
        grant,
        room=WARM_UP_ROOM,
        ranges={name: tokens for name, (tokens, _) in parts.items()},
        pages={name: grant.pages[name][: count * WIRE_PAGES.itemsize] for name, (_, count) in parts.items()},
        num_decode_ranks=1,
        digest=False,
    )
