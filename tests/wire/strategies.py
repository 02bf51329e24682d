"""Hypothesis strategies for all messages that a rank may send."""

from typing import Final

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.errors import FailureReason, Stage
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import ADDRESS_LIMIT, Location
from kvflow.geometry.ranges import TokenShard
from kvflow.geometry.routes import RegionSlice, Route
from kvflow.wire import messages as wm

__all__ = ["MESSAGES", "any_message", "layouts"]

ids: Final = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
"""Rooms, generations, tokens, incarnations: any unsigned integer of MessagePack."""

counts: Final = st.integers(0, 2**32 - 1)
positive_counts: Final = st.integers(1, 2**32 - 1)
seconds: Final = st.floats(0, 86_400, exclude_min=True) | st.integers(1, 86_400).map(float)
clocks: Final = st.floats(-(2**53), 2**53)
leases: Final = st.floats(0, 600, exclude_min=True)
names: Final = st.text(max_size=12)
blobs: Final = st.binary(max_size=40)
page_numbers: Final = st.lists(st.integers(0, 2**32 - 1), max_size=100)
page_tables: Final = page_numbers.map(lambda pages: np.array(pages, "<u4").tobytes())
positions: Final = st.integers(0, 2**40)
token_ranges: Final = st.tuples(positions, positions)
indices: Final = st.integers(0, 2**63 - 1)

ranks: Final = st.builds(wm.RankId, names, counts)
peers: Final = st.builds(wm.PeerId, ranks, ids)
failures: Final = st.builds(wm.Failure, st.sampled_from(FailureReason), st.sampled_from(Stage), names, names)


@st.composite
def regions(draw: st.DrawFn, tensor: str, layer: int, pages: tuple[int, int]) -> Region:
    """Draw a region with adjacent cells, anywhere in 64 bits."""
    slots, tokens_per_slot = pages
    first, num_heads, head_bytes = draw(st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(1, 512)))
    size = slots * tokens_per_slot * num_heads * head_bytes
    end = ADDRESS_LIMIT - size
    return Region(
        tensor=tensor,
        layer=layer,
        address=draw(st.integers(0, end) | st.sampled_from([0, 2**63, end])),
        slots=slots,
        slot_stride=tokens_per_slot * num_heads * head_bytes,
        tokens_per_slot=tokens_per_slot,
        token_stride=num_heads * head_bytes,
        heads=(first, first + num_heads),
        head_stride=head_bytes,
        head_bytes=head_bytes,
        dtype=draw(names),
        optional=draw(st.booleans()),
    )


@st.composite
def components(draw: st.DrawFn, name: str) -> Component:
    pages = draw(st.tuples(st.integers(1, 2**31 - 1), st.integers(1, 256)))
    keys = draw(st.lists(st.tuples(names, st.integers(0, 2**63 - 1)), min_size=1, max_size=3, unique=True))
    apart: list[Region] = []
    for tensor, layer in keys:
        region = draw(regions(tensor, layer, pages))
        if all(region.end <= other.address or other.end <= region.address for other in apart):
            apart.append(region)
    size = draw(st.integers(1, 256))
    shard = TokenShard(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 2**16)))
    return Component(name, tuple(apart), shard=shard)


kinds: Final = st.sampled_from(["DRAM", "VRAM"])


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    chosen = draw(st.lists(names, min_size=1, max_size=2, unique=True))
    layout = KVLayout(
        components=tuple(draw(components(name)) for name in chosen),
        fingerprint=draw(names),
        memory_kind=draw(kinds),
        device_id=draw(st.integers(0, 2**63 - 1)),
    )
    location = draw(st.none() | st.builds(Location, kinds, st.integers(0, 2**63 - 1)))
    return replace(layout, allocations=tuple(replace(one, location=location) for one in layout.allocations))


slices: Final = st.builds(RegionSlice, names, names, indices, st.tuples(indices, indices))
routes: Final = st.builds(Route, indices, st.lists(slices, max_size=3).map(tuple))


endpoints: Final = st.builds(
    "tcp://{}:{}".format, st.sampled_from(["10.0.0.1", "[::1]", "host"]), st.integers(1, 65_535)
)


@st.composite
def _records(draw: st.DrawFn) -> wm.RankRecord:
    num_ranks = draw(positive_counts)
    rank = wm.RankId(draw(names), draw(st.integers(0, num_ranks - 1)))
    return wm.RankRecord(
        peer=wm.PeerId(rank, draw(peers).incarnation),
        num_ranks=num_ranks,
        endpoint=draw(endpoints),
        backend=draw(names),
        layout=draw(layouts()),
    )


records: Final = _records()
windows: Final = st.builds(
    wm.StagingWindow,
    address=st.integers(0, 2**62 - 1),
    slot_bytes=st.integers(1, 2**53 - 1),
    num_slots=st.integers(1, 4_096),
)
rooms: Final = st.integers(0, 2**63 - 1) | st.text(min_size=1, max_size=256)
transfer_ids: Final = {"room": rooms, "generation": ids}

MESSAGES: Final[dict[type[wm.Message], st.SearchStrategy[wm.Message]]] = {
    wm.Register: st.builds(wm.Register, record=records, lease_s=leases),
    wm.Registered: st.builds(wm.Registered, peer=peers),
    wm.RegistrationConflict: st.builds(
        wm.RegistrationConflict, peer=peers, other=peers, other_endpoint=names, refused=st.booleans()
    ),
    wm.Unregister: st.builds(wm.Unregister, peer=peers),
    wm.Lookup: st.builds(
        wm.Lookup,
        instance=st.none() | names,
        timeout_s=st.floats(0, 60, exclude_min=True),
        number=counts,
    ),
    wm.Records: st.builds(
        wm.Records, instance=st.none() | names, records=st.lists(records, max_size=2).map(tuple), number=counts
    ),
    wm.Hello: st.builds(
        wm.Hello,
        peer=peers,
        to=peers,
        attempt=counts,
        versions=st.tuples(counts, counts),
        lease_s=leases,
        backend=names,
        backend_metadata=blobs,
        layout=layouts(),
        route=routes,
        staging=st.none() | windows,
        agent=st.none() | names.filter(bool),
        handshake_s=seconds,
    ),
    wm.Welcome: st.builds(wm.Welcome, peer=peers, attempt=counts, version=counts),
    wm.Refuse: st.builds(wm.Refuse, peer=peers, to=st.none() | peers, detail=names, attempt=st.none() | counts),
    wm.Grant: st.builds(
        wm.Grant,
        token=ids,
        ranges=st.dictionaries(names, token_ranges, max_size=3),
        pages=st.dictionaries(names, page_tables, max_size=3),
        num_pages=st.dictionaries(names, counts, max_size=3),
        num_decode_ranks=positive_counts,
        timeout_s=seconds,
        progress_s=seconds,
        priority=st.integers(0, 7),
        digest=st.booleans(),
        **transfer_ids,
    ),
    wm.GrantedPages: st.builds(wm.GrantedPages, part=counts, pages=page_tables, **transfer_ids),
    wm.PagesQuery: st.builds(wm.PagesQuery, start=counts, stop=counts, **transfer_ids),
    wm.Announce: st.builds(
        wm.Announce,
        num_decode_ranks=st.integers(1, 2**32 - 1),
        timeout_s=seconds,
        **transfer_ids,
    ),
    wm.Decline: st.builds(wm.Decline, failure=failures, **transfer_ids),
    wm.Offer: st.builds(wm.Offer, number=ids, ticket=blobs, tokens=token_ranges, timeout_s=seconds, metadata=blobs),
    wm.OfferAnswered: st.builds(wm.OfferAnswered, number=ids, failure=st.none() | failures),
    wm.Notice: st.builds(
        wm.Notice,
        token=ids,
        engine_rank=counts,
        seq=counts,
        ranges=st.dictionaries(names, token_ranges, max_size=3),
        num_bytes=ids,
        last=st.booleans(),
        metadata=blobs,
        digests=st.dictionaries(names, counts, max_size=3),
        layers=st.none() | st.tuples(counts, st.none() | counts),
        staged=st.none() | st.builds(wm.Staged, slot=counts, head_major=st.booleans()),
        stamps=st.none() | st.builds(wm.Stamps, *[clocks] * 5, st.none() | clocks),
        **transfer_ids,
    ),
    wm.Cancel: st.builds(wm.Cancel, failure=failures, **transfer_ids),
    wm.Drained: st.builds(wm.Drained, engine_rank=counts, failure=st.none() | failures, **transfer_ids),
    wm.Ack: st.builds(wm.Ack, **transfer_ids),
    wm.SlotQuery: st.builds(wm.SlotQuery, engine_rank=counts, seq=counts, **transfer_ids),
    wm.SlotReleased: st.builds(wm.SlotReleased, engine_rank=counts, seq=counts, **transfer_ids),
    wm.Failed: st.builds(wm.Failed, engine_rank=counts, failure=failures, drained=st.booleans(), **transfer_ids),
    wm.Ping: st.builds(wm.Ping, peer=peers, asks_ends=counts, sent_at=st.none() | clocks),
    wm.Pong: st.builds(
        wm.Pong,
        peer=peers,
        asks_ends=counts,
        ends=st.lists(st.binary(max_size=18), max_size=3).map(tuple),
        sent_at=st.none() | clocks,
        answered_at=st.none() | clocks,
    ),
    wm.Goodbye: st.builds(wm.Goodbye, peer=peers, failure=st.none() | failures, fenced=st.booleans()),
}

any_message: Final = st.one_of(*MESSAGES.values())
