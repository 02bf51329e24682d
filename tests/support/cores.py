"""Cores without a shell: events in, effects out."""

from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, Stage
from kvflow.geometry.cutting import Cutting
from kvflow.geometry.debts import Debt
from kvflow.geometry.tokens import WHOLE
from kvflow.state import events as ev
from kvflow.state.core import Core
from kvflow.state.effects import Effect, ReportReceiver, ReportSender, SendMessage
from kvflow.state.invariants import check_invariants
from kvflow.wire.messages import Failure, Grant, Message, PeerId, Ping, Pong, RankId

__all__ = [
    "ABORTED",
    "DECODE",
    "PREFILL",
    "CoreDriver",
    "abort_failure",
    "debts",
    "grant",
    "messages",
    "pass_time",
    "peer",
    "reports",
]


def peer(instance: str, engine_rank: int = 0, incarnation: int = 1) -> PeerId:
    return PeerId(RankId(instance, engine_rank), incarnation)


PREFILL = peer("prefill")
DECODE = peer("decode")
LEASE_S = 3.0


def abort_failure(detail: str = "gone") -> Failure:
    return Failure(FailureReason.ABORTED, Stage.ENQUEUE, "x/0", detail)


ABORTED = abort_failure()


class CoreDriver:
    """A core with a clock of its own; checks the invariants after every event."""

    def __init__(
        self,
        me: PeerId,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        *,
        ends_with_process: bool = True,
    ) -> None:
        self.core = Core(me, timeouts or Timeouts(), limits or Limits(), ends_with_process=ends_with_process)
        self.now = 100.0

    def __call__(self, event: ev.Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        check_invariants(self.core)
        return effects

    def hear(self, sender: PeerId, message: Message) -> list[Effect]:
        return self(ev.MessageReceived(sender, message))

    def sleep(self, seconds: float) -> list[Effect]:
        """Let time pass, deadline by deadline, as a clock task would."""
        effects: list[Effect] = []
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self(ev.TimePassed())
        self.now = end
        return effects

    def meet_decode(
        self, other: PeerId = DECODE, *, owed: tuple[str, ...] = ("kv",), cutting: Cutting | None = None
    ) -> None:
        self(ev.PeerGreeted(other, LEASE_S, owed, cutting))

    def meet_prefill(self, *others: PeerId, bytes_per_token: int = 2, instance: str = "prefill") -> list[Effect]:
        ranks = tuple(ev.GreetedRank(other, debts(bytes_per_token)) for other in others)
        return self(ev.InstanceGreeted(instance, ranks))


def pass_time(core: CoreDriver, seconds: float) -> list[Effect]:
    """Let time pass while every peer shows that it lives."""
    effects: list[Effect] = []
    for _ in range(round(seconds)):
        for other in list(core.core.peers):
            core.hear(other, Pong(peer=other) if core.core.me == DECODE else Ping(peer=other))
        effects += core.sleep(1.0)
    return effects


def debts(bytes_per_token: int = 2) -> dict[str, Debt]:
    """What a rank owes that holds every token of one component; nothing at all for 0."""
    return {"kv": Debt(WHOLE, WHOLE, {1: bytes_per_token})} if bytes_per_token else {}


def grant(room: int = 7, generation: int = 1, tokens: tuple[int, int] = (0, 8), **changes: object) -> Grant:
    fields: dict[str, object] = {
        "token": 99,
        "pages": {"kv": b"\0" * 4},
        "num_decode_ranks": 1,
        "timeout_s": 60.0,
        "progress_s": 30.0,
        "priority": 0,
        "digest": False,
    }
    return Grant(room=room, generation=generation, **({"ranges": {"kv": tokens}} | fields | changes))  # type: ignore[arg-type]


def messages(effects: list[Effect], kind: type[Message]) -> list[tuple[PeerId, Message]]:
    """Messages of one kind among effects, with their receivers."""
    return [
        (effect.peer, effect.message)
        for effect in effects
        if isinstance(effect, SendMessage) and isinstance(effect.message, kind)
    ]


def reports(effects: list[Effect]) -> list[tuple[str, str]]:
    """Outcome and memory of each report among effects."""
    return [
        (effect.outcome.value, effect.memory.value)
        for effect in effects
        if isinstance(effect, (ReportSender, ReportReceiver))
    ]
