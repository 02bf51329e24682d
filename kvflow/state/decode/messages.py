"""What a room tells the ranks of its instance: messages made of the engine's request."""

import hashlib

from kvflow.state.events import ReceiveOpened
from kvflow.wire.messages import PAGE_BYTES, PARTS_PER_QUERY, Announce, Grant, GrantedPages, PagesQuery

__all__ = ["grant_token", "make_announce", "make_grant", "make_parts"]


def grant_token(secret: bytes, engine_rank: int) -> int:
    """Derive the token that notices of one rank must carry; no rank can derive another's."""
    digest = hashlib.blake2b(engine_rank.to_bytes(8, "little"), key=secret, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def make_announce(opened: ReceiveOpened, timeout_s: float) -> Announce:
    """Return an announcement of a room that has no pages yet."""
    return Announce(
        room=opened.room,
        generation=opened.generation,
        num_decode_ranks=opened.num_decode_ranks,
        timeout_s=timeout_s,
        capability=opened.capability,
    )


def make_grant(
    opened: ReceiveOpened, token: int | None, timeout_s: float, progress_s: float, *, is_inline: bool
) -> Grant:
    """Return a grant for one rank, with the pages or their number; without a token, it sends nothing."""
    pages, num_pages = {}, {}
    if token is not None and is_inline:
        pages = dict(opened.pages)
    elif token is not None:
        num_pages = {name: len(data) // PAGE_BYTES for name, data in opened.pages.items()}
    return Grant(
        room=opened.room,
        generation=opened.generation,
        token=token or 0,
        ranges=dict(opened.ranges),
        pages=pages,
        num_pages=num_pages,
        num_decode_ranks=opened.num_decode_ranks,
        timeout_s=timeout_s,
        progress_s=progress_s,
        priority=opened.priority,
        digest=opened.digest,
        capability=opened.capability,
    )


def make_parts(opened: ReceiveOpened, query: PagesQuery) -> list[GrantedPages]:
    """Return the parts of the page tables that a rank asks for."""
    parts = make_grant(opened, 0, 0.0, 0.0, is_inline=False).parts
    wanted = parts[query.start : min(query.stop, query.start + PARTS_PER_QUERY)]
    return [
        GrantedPages(
            room=opened.room,
            generation=opened.generation,
            part=number,
            pages=opened.pages[name][first * PAGE_BYTES : last * PAGE_BYTES],
        )
        for number, (name, first, last) in enumerate(wanted, query.start)
    ]
