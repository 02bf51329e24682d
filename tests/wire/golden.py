"""One message of each kind, with every field set, and its bytes in protocol version 3.

Deployed versions read these bytes. A change of the code that changes them needs a new protocol version; only a new
message, or a new field with a default, may change the file: `python -m tests.wire.golden` rewrites it.
"""

from pathlib import Path
from typing import Final

from kvflow.errors import FailureReason, Stage
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import Location, MemoryRange
from kvflow.geometry.routes import RegionSlice, Route
from kvflow.wire import messages as wm
from kvflow.wire.codec import encode

__all__ = ["FILE", "MESSAGES", "read"]

FILE: Final = Path(__file__).with_name(f"golden_v{wm.PROTOCOL_VERSION}.txt")

PREFILL: Final = wm.PeerId(wm.RankId("prefill", 1), 0x0123456789ABCDEF)
DECODE: Final = wm.PeerId(wm.RankId("decode", 0), 2**64 - 1)
FAILURE: Final = wm.Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/1", "why")

LAYOUT: Final = KVLayout(
    components=(
        Component(
            "kv",
            (
                Region(
                    tensor="k",
                    layer=3,
                    address=2**63,
                    slots=4,
                    slot_stride=256,
                    tokens_per_slot=2,
                    token_stride=128,
                    heads=(2, 4),
                    head_stride=64,
                    head_bytes=32,
                    dtype="bfloat16",
                    optional=True,
                ),
            ),
        ),
    ),
    fingerprint="model",
    allocations=(MemoryRange(2**63, 992, Location("DRAM", 2)),),
    memory_kind="VRAM",
    device_id=1,
)

RECORD: Final = wm.RankRecord(peer=PREFILL, num_ranks=2, endpoint="tcp://10.0.0.1:7000", backend="nixl", layout=LAYOUT)

MESSAGES: Final[dict[str, wm.Message]] = {
    "register": wm.Register(record=RECORD, lease_s=9.0),
    "registered": wm.Registered(peer=PREFILL),
    "registration_conflict": wm.RegistrationConflict(
        peer=PREFILL, other=DECODE, other_endpoint="tcp://10.0.0.2:7000", refused=True
    ),
    "unregister": wm.Unregister(peer=PREFILL),
    "lookup": wm.Lookup(instance="prefill", timeout_s=0.8, number=3),
    "records": wm.Records(instance="prefill", records=(RECORD,), number=3),
    "hello": wm.Hello(
        peer=DECODE,
        to=PREFILL,
        attempt=5,
        versions=(3, 3),
        lease_s=3.0,
        backend="nixl",
        backend_metadata=b"\0\xff",
        layout=LAYOUT,
        route=Route(0, (RegionSlice("kv", "k", 3, (2, 4)),)),
        staging=wm.StagingWindow(address=2**40, slot_bytes=2**23, num_slots=3),
        agent="both/0@0000000000000007",
        handshake_s=7.0,
    ),
    "welcome": wm.Welcome(
        peer=PREFILL, attempt=5, version=3, domain=b"a kernel", endpoint="tcp://10.0.0.2:7000", max_pages=9
    ),
    "refuse": wm.Refuse(peer=PREFILL, to=DECODE, detail="no", attempt=5),
    "grant": wm.Grant(
        room=7,
        generation=8,
        token=2**63 + 1,
        ranges={"kv": (0, 8)},
        pages={"kv": b"\x01\0\0\0"},
        num_decode_ranks=2,
        timeout_s=120.0,
        progress_s=30.0,
        priority=1,
        digest=True,
        capability="signed",
        num_pages={"kv": 2},
    ),
    "granted_pages": wm.GrantedPages(room=7, generation=8, part=1, pages=bytes(range(9, 0, -1)) * 44),
    "pages_query": wm.PagesQuery(room=7, generation=8, start=1, stop=3),
    "announce": wm.Announce(room=7, generation=3, num_decode_ranks=2, timeout_s=600.0, capability="signed"),
    "decline": wm.Decline(room=7, generation=3, failure=FAILURE, capability="signed", peer=DECODE, to=PREFILL),
    "offer": wm.Offer(number=5, ticket=b'{"room": "7"}', tokens=(0, 8), timeout_s=30.0, metadata=b"digest"),
    "offer_answered": wm.OfferAnswered(number=5, failure=FAILURE),
    "notice": wm.Notice(
        room=7,
        generation=8,
        token=2**63 + 1,
        engine_rank=1,
        seq=2,
        ranges={"kv": (4, 8)},
        num_bytes=512,
        last=True,
        metadata=b"meta",
        digests={"kv": 2**32 - 1},
        layers=(2, None),
        staged=wm.Staged(slot=1, head_major=True),
        stamps=wm.Stamps(1.5, 2.5, 3.5, 4.5, 5.5, 6.5),
    ),
    "slot_released": wm.SlotReleased(room=7, generation=8, engine_rank=1, seq=2),
    "slot_query": wm.SlotQuery(room=7, generation=8, engine_rank=1, seq=2),
    "ack": wm.Ack(room=7, generation=8),
    "cancel": wm.Cancel(room=7, generation=8, failure=FAILURE, has_landed=True),
    "drained": wm.Drained(room=7, generation=8, engine_rank=1, failure=FAILURE, in_flight=b"a kernel"),
    "failed": wm.Failed(room=7, generation=8, engine_rank=1, failure=FAILURE, drained=True),
    "ping": wm.Ping(peer=DECODE, asks_ends=3, sent_at=1.5),
    "pong": wm.Pong(peer=PREFILL, asks_ends=3, ends=(b"\x0a\x00\x00\x01\x10\x00",), sent_at=1.5, answered_at=3601.5),
    "goodbye": wm.Goodbye(peer=PREFILL, failure=FAILURE, fenced=True),
}
"""Messages by their tag on the wire."""


def read() -> dict[str, bytes]:
    """Return the bytes in the file by message tag."""
    lines = [line.split() for line in FILE.read_text().splitlines()]
    return {tag: bytes.fromhex(digits) for tag, digits in lines}


if __name__ == "__main__":
    FILE.write_text("".join(f"{tag} {encode(message).hex()}\n" for tag, message in MESSAGES.items()))
