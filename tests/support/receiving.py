"""A decode rank's core, and messages of prefill ranks to it."""

from collections.abc import Sequence

from kvflow.state import events as ev
from kvflow.state.effects import DecodeEffect
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import Grant, Notice, PeerId
from tests.support.cores import DecodeDriver, Effect, messages
from tests.support.small_routes import NUM_PAGES

__all__ = ["ROOM", "Transfer", "request"]

ROOM = 7


def request(
    generation: int = 1,
    *,
    room: int = ROOM,
    tokens: tuple[int, int] = (0, 8),
    timeout_s: float = 60.0,
    footprint: Footprint = NO_MEMORY,
    digest: bool = False,
    instance: ev.InstanceRef = "prefill",
    issuer: PeerId | None = None,
) -> ev.ReceiveOpened:
    return ev.ReceiveOpened(
        room=room,
        generation=generation,
        instance=instance,
        ranges={"kv": tokens},
        pages={"kv": generation.to_bytes(4, "little") if generation < NUM_PAGES else b""},
        num_decode_ranks=1,
        timeout_s=timeout_s,
        secret=b"0123456789abcdef",
        footprint=footprint,
        digest=digest,
        issuer=issuer,
    )


class Transfer:
    """The grants of a core, with which tests send notices for its prefill ranks; `said` is the last notice."""

    said: Notice

    def __init__(self, core: DecodeDriver, effects: Sequence[Effect]) -> None:
        self.core = core
        self.grants = {
            receiver: message for receiver, message in messages(effects, Grant) if isinstance(message, Grant)
        }

    def notice(self, sender: PeerId, seq: int, tokens: tuple[int, int], **changes: object) -> list[DecodeEffect]:
        self.said = self.make(sender, seq, tokens, **changes)
        return self.core(ev.NoticeDelivered(self.said))

    def make(self, sender: PeerId, seq: int, tokens: tuple[int, int], **changes: object) -> Notice:
        """Return a notice of a prefill rank without sending it."""
        granted = self.grants[sender]
        ranges = {"kv": tokens} if tokens[0] < tokens[1] else {}
        fields: dict[str, object] = {
            "room": granted.room,
            "generation": granted.generation,
            "token": granted.token,
            "engine_rank": sender.rank.engine_rank,
            "num_bytes": 2 * (tokens[1] - tokens[0]),
        }
        return Notice(seq=seq, ranges=ranges, **(fields | changes))  # type: ignore[arg-type]
