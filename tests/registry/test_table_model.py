"""The registry's table against the same rules written without any index."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.registry.table import Answer, RegistryTable
from kvflow.wire.messages import Card, RankId
from tests.registry.cards import card

Brief = tuple[bytes, str, list[tuple[int, int]]]
"""Who is answered about which instance, and each rank with its life."""

Wait = tuple[str, bytes, float]
"""Which instance, who asked, and until when."""


def brief(answers: list[Answer]) -> list[Brief]:
    return [(answer.connection, answer.cards.instance, lives(answer.cards.cards)) for answer in answers]


def lives(cards: tuple[Card, ...]) -> list[tuple[int, int]]:
    return [(held.peer.rank.engine_rank, held.peer.incarnation) for held in cards]


def is_due(wait: Wait, when: float) -> bool:
    return wait[2] == when


@dataclass
class Model:
    """The same rules without any index: two lists that are searched from end to end."""

    ranks: list[tuple[Card, float]] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def held(self, instance: str) -> list[Card]:
        cards = [held for held, _ in self.ranks if held.peer.rank.instance == instance]
        return sorted(cards, key=lambda held: held.peer.rank.engine_rank)

    def is_whole(self, instance: str) -> bool:
        cards = self.held(instance)
        return bool(cards) and {held.peer.rank.engine_rank for held in cards} == set(range(cards[0].num_ranks))

    def register(self, new: Card, until: float) -> list[Brief]:
        self.forget(new.peer.rank)
        self.ranks.append((new, until))
        instance = new.peer.rank.instance
        return self.answer(lambda wait: wait[0] == instance) if self.is_whole(instance) else []

    def forget(self, rank: RankId, life: int | None = None) -> None:
        self.ranks = [
            (held, until)
            for held, until in self.ranks
            if held.peer.rank != rank or life not in (None, held.peer.incarnation)
        ]

    def lookup(self, instance: str, connection: bytes, until: float) -> list[Brief]:
        """Whoever asks again keeps the place in line."""
        asked = [wait[:2] for wait in self.waits]
        place = asked.index((instance, connection)) if (instance, connection) in asked else len(asked)
        self.waits[place : place + 1] = [(instance, connection, until)]
        return self.answer(lambda wait: wait[:2] == (instance, connection)) if self.is_whole(instance) else []

    def expire(self, now: float) -> list[Brief]:
        answers = []
        while due := sorted(when for when in self.deadlines() if when <= now):
            self.ranks = [entry for entry in self.ranks if entry[1] != due[0]]
            answers += self.answer(partial(is_due, when=due[0]))
        return answers

    def deadlines(self) -> list[float]:
        return [until for _, until in self.ranks] + [until for _, _, until in self.waits]

    def answer(self, is_meant: Callable[[Wait], bool]) -> list[Brief]:
        meant = [wait for wait in self.waits if is_meant(wait)]
        self.waits = [wait for wait in self.waits if not is_meant(wait)]
        return [(connection, instance, lives(tuple(self.held(instance)))) for instance, connection, _ in meant]


@dataclass(frozen=True)
class Step:
    """One call of the table; the fields that a kind of call has no use for are ignored."""

    kind: str
    instance: str
    engine_rank: int
    life: int
    connection: bytes
    seconds: int


steps = st.builds(
    Step,
    kind=st.sampled_from(["register", "register", "unregister", "lookup", "lookup", "expire"]),
    instance=st.sampled_from(["x", "y"]),
    engine_rank=st.integers(0, 2),
    life=st.integers(1, 2),
    connection=st.sampled_from([b"a", b"b"]),
    seconds=st.integers(1, 6),
)


def apply(table: RegistryTable, model: Model, step: Step, now: float, until: float) -> tuple[list[Brief], list[Brief]]:
    """Do one step on both; gives both answers."""
    num_ranks = {"x": 1, "y": 3}[step.instance]
    new = card(step.instance, step.engine_rank % num_ranks, num_ranks, life=step.life)
    match step.kind:
        case "register":
            return brief(table.register(new, until - now, now)), model.register(new, until)
        case "unregister":
            table.unregister(new.peer)
            model.forget(new.peer.rank, new.peer.incarnation)
            return [], []
        case "lookup":
            answers = table.lookup(step.instance, until - now, step.connection, now)
            return brief(answers), model.lookup(step.instance, step.connection, until)
        case _:
            return brief(table.expire(now)), model.expire(now)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=30))
def test_table_follows_the_rules(history: list[Step]) -> None:
    """Deadlines are all different, so that their order is certain."""
    table, model, now = RegistryTable(), Model(), 0
    for number, step in enumerate(history):
        now += 1_000 * (step.seconds if step.kind == "expire" else 0)
        answers, expected = apply(table, model, step, now, now + 1_000 * step.seconds + number)
        assert answers == expected
        assert table.num_ranks == len(model.ranks)
        assert len(table.deadlines) == len(model.ranks) + len(model.waits)
