"""The registry's table, compared to a model of the same rules without any index."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.directory.table import RegistryTable
from kvflow.wire.messages import PeerId, RankId, SealedRecord
from tests.directory.answers import Brief, brief, incarnations
from tests.directory.records import sealed

Wait = tuple[str, bytes, float]
"""Instance, connection that asked, and deadline."""


def is_due(wait: Wait, when: float) -> bool:
    return wait[2] == when


@dataclass
class Claim:
    """An incarnation that registers a rank; one incarnation holds the rank, and another may contend for it."""

    record: SealedRecord
    connection: bytes
    until: float
    part: str = "holder"
    times_again: int = 0
    """Number of its registrations since it was replaced."""

    @property
    def peer(self) -> PeerId:
        return self.record.peer


@dataclass
class Model:
    """The rules without any index: two lists with linear search."""

    claims: list[Claim] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def part(self, rank: RankId, part: str) -> Claim | None:
        found = [claim for claim in self.claims if claim.peer.rank == rank and claim.part == part]
        assert len(found) <= 1
        return found[0] if found else None

    def held(self, instance: str) -> tuple[SealedRecord, ...]:
        claims = [claim for claim in self.claims if claim.peer.rank.instance == instance and claim.part == "holder"]
        return tuple(sorted((claim.record for claim in claims), key=lambda held: held.peer.rank.engine_rank))

    def is_whole(self, instance: str) -> bool:
        records = self.held(instance)
        return bool(records) and {held.peer.rank.engine_rank for held in records} == set(range(records[0].num_ranks))

    def register(self, new: SealedRecord, connection: bytes, until: float) -> list[Brief]:
        rank = new.peer.rank
        known = [claim for claim in self.claims if claim.peer == new.peer]
        claim = Claim(new, connection, until, known[0].part if known else "new")
        claim.times_again = known[0].times_again + 1 if known else 0
        self.claims = [other for other in self.claims if other.peer != new.peer]
        self.place(claim)
        self.claims.append(claim)
        answers: list[Brief] = []
        if claim.part != "refused":
            answers.append((connection, "registered", new.peer.incarnation))
        holder, refused = self.part(rank, "holder"), self.part(rank, "refused")
        if holder is not None and refused is not None:
            mine, others = holder.peer.incarnation, refused.peer.incarnation
            answers += [(refused.connection, "refused", others, mine), (holder.connection, "disputed", mine, others)]
        if claim.part == "holder" and self.is_whole(rank.instance):
            answers += self.answer(lambda wait: wait[0] == rank.instance)
        return answers

    def place(self, claim: Claim) -> None:
        """Assign parts to a claim and to the others of its rank."""
        rank = claim.peer.rank
        holder, refused, replaced = (self.part(rank, part) for part in ("holder", "refused", "replaced"))
        if claim.part in ("holder", "refused"):
            return
        if claim.part == "replaced":
            if claim.times_again < 2:
                return
            claim.part = "holder"
            assert holder is not None
            holder.part = "refused"
        elif holder is None:
            claim.part = "holder"
        elif refused is not None:
            self.claims.remove(refused)
            claim.part = "refused"
        else:
            if replaced is not None:
                self.claims.remove(replaced)
            claim.part, holder.part, holder.times_again = "holder", "replaced", 0

    def forget(self, peer: PeerId) -> None:
        """Remove a claim. A refused one succeeds a holder that leaves; a replaced one counts as gone."""
        gone = [claim for claim in self.claims if claim.peer == peer]
        self.claims = [claim for claim in self.claims if claim.peer != peer]
        if gone and gone[0].part == "holder":
            refused, replaced = self.part(peer.rank, "refused"), self.part(peer.rank, "replaced")
            if refused is not None:
                refused.part = "holder"
            if replaced is not None:
                self.claims.remove(replaced)

    def lookup(self, instance: str, connection: bytes, until: float) -> list[Brief]:
        """Answer a lookup, or queue it; a repeated one keeps its place and its deadline."""
        if (instance, connection) not in [wait[:2] for wait in self.waits]:
            self.waits.append((instance, connection, until))
        return self.answer(lambda wait: wait[:2] == (instance, connection)) if self.is_whole(instance) else []

    def expire(self, now: float) -> list[Brief]:
        answers = []
        while due := sorted(when for when in self.deadlines() if when <= now):
            for claim in [claim for claim in self.claims if claim.until == due[0]]:
                self.forget(claim.peer)
            answers += self.answer(partial(is_due, when=due[0]))
        return answers

    def deadlines(self) -> list[float]:
        return [claim.until for claim in self.claims] + [until for _, _, until in self.waits]

    def answer(self, is_meant: Callable[[Wait], bool]) -> list[Brief]:
        meant = [wait for wait in self.waits if is_meant(wait)]
        self.waits = [wait for wait in self.waits if not is_meant(wait)]
        return [
            (connection, "records", instance, incarnations(self.held(instance))) for instance, connection, _ in meant
        ]


@dataclass(frozen=True)
class Step:
    """One call of the table; each kind ignores the fields that it does not need."""

    kind: str
    instance: str
    engine_rank: int
    incarnation: int
    connection: bytes
    seconds: int


steps = st.builds(
    Step,
    kind=st.sampled_from(["register", "register", "register", "gone", "unregister", "lookup", "lookup", "expire"]),
    instance=st.sampled_from(["x", "y"]),
    engine_rank=st.integers(0, 2),
    incarnation=st.integers(1, 3),
    connection=st.sampled_from([b"a", b"b"]),
    seconds=st.integers(1, 6),
)


def apply(table: RegistryTable, model: Model, step: Step, now: float, until: float) -> tuple[list[Brief], list[Brief]]:
    """Apply a step to both, and return both answers."""
    num_ranks = {"x": 1, "y": 3}[step.instance]
    new = sealed(step.instance, step.engine_rank % num_ranks, num_ranks, incarnation=step.incarnation)
    match step.kind:
        case "register":
            answers = [table.answer_to(new, step.connection), *table.register(new, until - now, step.connection, now)]
            return brief(answers), model.register(new, step.connection, until)
        case "gone":  # the registering peer cannot be reached
            answer = table.answer_to(new, step.connection)
            return brief([answer])[:1], copy.deepcopy(model).register(new, step.connection, until)[:1]
        case "unregister":
            table.unregister(new.peer)
            model.forget(new.peer)
            return [], []
        case "lookup":
            answers = table.lookup(step.instance, until - now, step.connection, now)
            return brief(answers), model.lookup(step.instance, step.connection, until)
        case _:
            return brief(table.expire(now)), model.expire(now)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_table_follows_the_rules(history: list[Step]) -> None:
    """All deadlines are different, which makes their order unique."""
    table, model, now = RegistryTable(), Model(), 0
    for number, step in enumerate(history):
        now += 1_000 * (step.seconds if step.kind == "expire" else 0)
        answers, expected = apply(table, model, step, now, now + 1_000 * step.seconds + number)
        assert answers == expected
        assert table.num_ranks == sum(claim.part == "holder" for claim in model.claims)
        assert table.num_waiting == len(model.waits)
        assert len(table.timers) == len(model.claims) + len(model.waits)
        known = {claim.peer.rank.instance for claim in model.claims} | {instance for instance, *_ in model.waits}
        assert set(table._instances) == known
