"""How much each sender may ask for in a while, and have queued. Pure."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvflow.gate.sizes import Unread
from kvflow.gate.verdict import ACCEPTED, Action, Verdict
from kvflow.trust import ANY
from kvflow.wire.messages import Decline, Hello, SealedRegister

__all__ = ["RECORDS_BYTES", "Budget", "Budgets", "ListenerGate", "QueuedMessages"]


@dataclass(frozen=True, eq=False)
class Budget:
    """What each taker may spend: a token bucket of this capacity, refilled at this rate."""

    at_once: int
    per_s: float


HELLOS: Final = Budget(1_024, 256)
"""Hellos of a principal; without keys, of all peers together. The burst is for a whole instance that starts. Decode
ranks repeat what is not answered."""

HELLO_BYTES: Final = Budget(4 * 2**20, 2**19)
"""The same in bytes, because regions take time to parse: half a megabyte takes less than 0.1 s. The burst is enough for
350 ranks with 126 layers each."""

STRANGERS: Final = Budget(1_024, 256)
"""Messages that a principal sends over connections without a Hello; without keys, of each such connection. Some may be
meant for a previous process at this address. Those over the budget count as rejected, so that the connection is soon
closed."""

REGISTER_BYTES: Final = Budget(64 * 2**20, 8 * 2**20)
"""Registers of a principal; without keys, of a connection. Layouts are not parsed here, so this rate takes a few
hundredths of the time. It is enough to renew 400 ranks with records of 60 KB."""

ANSWER_BYTES: Final = Budget(256 * 2**20, 64 * 2**20)
"""Records sent to a principal; without keys, to a connection: a Lookup is short, but its answer may have 8 MiB. Ranks
repeat unanswered lookups."""

RECORDS_BYTES: Final = Budget(32 * 2**20, 2**20)
"""Long answers of a registry: a megabyte of layouts takes 0.2 s to parse. Lookups whose answers are dropped are
repeated."""

REJECTIONS: Final = Budget(1_024, 64)
"""Messages of a principal that are malformed or sent in the name of others; without keys, of a connection. Ranks hardly
ever send any. Whoever sends more loses the connection."""

BYTES_OF_REJECTION: Final = 16 * 2**10
"""A rejected message counts once more per this many bytes: it was not parsed, but it was received."""

MAX_TAKERS: Final = 4_096
"""Maximum number of takers whose spending is remembered, for each budget; then all have everything again."""


class Budgets:
    """What each taker has left of each budget."""

    def __init__(self) -> None:
        self._left: defaultdict[Budget, dict[bytes | str, tuple[float, float]]] = defaultdict(dict)

    def spend(self, budget: Budget, taker: bytes | str, now: float, amount: float = 1) -> bool:
        """Take `amount` from a taker's budget; return False and take nothing if less is left."""
        takers = self._left[budget]
        left, since = takers.get(taker, (float(budget.at_once), now))
        left = min(budget.at_once, left + (now - since) * budget.per_s)
        has_enough = left >= amount
        if taker not in takers and len(takers) >= MAX_TAKERS:
            takers.clear()
        takers[taker] = (left - has_enough * amount, now)
        return has_enough


class ListenerGate:
    """Judges what arrives at a listener before it is parsed; `names_of` returns whom a connection may act for."""

    def __init__(self, names_of: Callable[[bytes], tuple[str, ...]]) -> None:
        self._names_of = names_of
        self._budgets = Budgets()

    def principal_of(self, connection: bytes) -> str:
        """Return what identifies the principal of a connection; empty without keys."""
        names = self._names_of(connection)
        return "" if names == (ANY,) else "\n".join(names)

    def admit(self, connection: bytes, unread: Unread, now: float, *, is_known: bool) -> Verdict:
        """Decide whether a message is parsed; `is_known` if its sender has sent a Hello here, or needs none."""
        kind, num_bytes = unread.kind, len(unread.data)
        if kind is Hello:
            principal = self.principal_of(connection)
            is_within = self._budgets.spend(HELLOS, principal, now)
            if is_within and self._budgets.spend(HELLO_BYTES, principal, now, num_bytes):
                return ACCEPTED
            return self._postpone("hello_over_budget", connection, unread, now)
        is_register = kind is SealedRegister
        if not is_known and kind is not Decline and not self._spend(STRANGERS, connection, now):
            return self.reject("stranger_over_budget", connection, num_bytes, now, is_repeated=is_register)
        if is_register and not self._spend(REGISTER_BYTES, connection, now, num_bytes):
            return self._postpone("register_over_budget", connection, unread, now)
        return ACCEPTED

    def reject(self, kind: str, connection: bytes, num_bytes: int, now: float, *, is_repeated: bool = False) -> Verdict:
        """Drop a message, which counts as `kind`, and decide whether its connection is cut.

        `is_repeated`: honest peers repeat it until it is accepted, which all ranks of a principal may do at once, so it
        counts for its connection only.
        """
        taker = connection if is_repeated else self.principal_of(connection) or connection
        is_within = self._budgets.spend(REJECTIONS, taker, now, 1 + num_bytes // BYTES_OF_REJECTION)
        cut = "" if is_within else f"too many rejected messages (at_once={REJECTIONS.at_once})"
        return Verdict(Action.DROP, kind, cut)

    def may_tell(self, connection: bytes, num_bytes: int, now: float) -> Verdict:
        """Decide whether records of this size are sent in answer to a Lookup."""
        is_within = self._spend(ANSWER_BYTES, connection, now, num_bytes)
        return ACCEPTED if is_within else Verdict(Action.POSTPONE, "lookup_over_budget")

    def _postpone(self, kind: str, connection: bytes, unread: Unread, now: float) -> Verdict:
        """Postpone a message. A long one has cost time to receive and decrypt, so it also counts as rejected."""
        cut = ""
        if unread.is_long:
            cut = self.reject(kind, connection, len(unread.data), now, is_repeated=True).cut
        return Verdict(Action.POSTPONE, kind, cut)

    def _spend(self, budget: Budget, connection: bytes, now: float, amount: float = 1) -> bool:
        return self._budgets.spend(budget, self.principal_of(connection) or connection, now, amount)


MAX_QUEUED_BYTES: Final = 16 * 2**20
"""Limit per principal for queued messages: long ones, and those that arrived after them."""

OVERHEAD_BYTES: Final = 256
"""Counted for each queued message in addition to its bytes."""


class QueuedMessages:
    """The queued messages of one principal; the first one is being parsed. `num_bytes` includes overhead."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, Unread]] = deque()
        self.connections: Counter[bytes] = Counter()
        self.num_bytes = 0

    def add_message(self, connection: bytes, unread: Unread) -> Verdict:
        """Queue a message if there is room."""
        if self.num_bytes + len(unread.data) > MAX_QUEUED_BYTES:
            return Verdict(Action.POSTPONE, "message_over_budget")
        self.waiting.append((connection, unread))
        self.connections[connection] += 1
        self.num_bytes += len(unread.data) + OVERHEAD_BYTES
        return ACCEPTED

    def drop_first(self) -> None:
        """Remove the first message, which was parsed."""
        connection, unread = self.waiting.popleft()
        self.connections[connection] -= 1
        self.num_bytes -= len(unread.data) + OVERHEAD_BYTES
