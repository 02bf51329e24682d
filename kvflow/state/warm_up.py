"""What a warm-up is about. Pure.

Code that has not run for some ten milliseconds takes three to four times as long as usual: the caches of a processor
that does something else meanwhile, or sleeps, have it no more. So while a room waits for its last chunk, its rank may
run through what comes next, with a core that is thrown away (`warm_up_core` of both cores).
"""

from typing import Final

from msgspec.structs import replace

from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, first_page
from kvflow.wire.messages import Grant

__all__ = ["WARM_UP_ROOM", "first_page_of"]

WARM_UP_ROOM: Final = 2**63 - 1
"""The room of a warm-up. Nothing of it leaves the core that is thrown away; while an engine uses it, there are none."""


def first_page_of(grant: Grant, layout: KVLayout) -> Grant:
    """Make a grant for the first page of another one, to the same pages.

    Args:
        grant: Of a decode rank.
        layout: Of that decode rank.
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
