"""What happened, in words: events and effects as lines of a story."""

from kvflow.observe.trace import describe
from kvflow.state import effects as ef
from kvflow.state import events as ev
from kvflow.wire.messages import PeerId, Ping, Pong

__all__ = ["is_chatter", "tell_effect", "tell_event"]

HIDDEN = ("stage", "message", "peer", "room", "generation", "from_rank", "noticed_by")


def is_chatter(event: ev.Event, effects: list[ef.Effect]) -> bool:
    """Say whether nothing but a sign of life was exchanged."""
    is_ping = isinstance(event, ev.MessageReceived) and isinstance(event.message, (Ping, Pong))
    is_time = isinstance(event, ev.TimePassed)
    signs = all(isinstance(effect, ef.SendMessage) and isinstance(effect.message, (Ping, Pong)) for effect in effects)
    return (is_ping or is_time) and signs


def tell_event(event: ev.Event) -> str:
    """Say what a rank is told."""
    name, values = describe(event)
    if isinstance(event, ev.MessageReceived):
        return f"hears {type(event.message).__name__} from {short(event.peer)}{_about(values)}"
    return f"{name.replace('_', ' ')}{_about(values)}"


def tell_effect(effect: ef.Effect) -> str | None:
    """Say what a rank does about it; None for what no reader misses."""
    name, values = describe(effect)
    match effect:
        case ef.SendMessage(peer, message):
            return (
                None
                if isinstance(message, (Ping, Pong))
                else f"says {type(message).__name__} to {short(peer)}{_about(values)}"
            )
        case ef.ReportSender() | ef.ReportReceiver():
            return f"REPORTS {effect.outcome.value}, memory {effect.memory.value}{_about(values)}"
        case ef.CountOddity(kind):
            return f"ignores: {kind.replace('_', ' ')}{_about(values)}"
        case _:
            return f"{name.replace('_', ' ')}{_about(values)}"


def short(peer: PeerId) -> str:
    """A life of a rank, in a few letters."""
    return f"{peer.rank}@{peer.incarnation & 0xFFFF:04x}"


def _about(values: dict[str, object]) -> str:
    subject = "".join(f" {key} {values[key]}" for key in ("room", "generation") if key in values)
    rest = ", ".join(f"{key}={value}" for key, value in values.items() if key not in (*HIDDEN, "outcome", "memory"))
    return f"{subject}{f' ({rest})' if rest else ''}"
