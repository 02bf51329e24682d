"""Slots on the prefill side: who may write where, and what sets a slot free."""

import pytest

from kvflow.errors import FailureReason, Stage
from kvflow.geometry.tokens import TokenRange
from kvflow.state import events as ev
from kvflow.state.effects import Effect, OfferSlots, PostPlan
from kvflow.state.events import Chunk, DeliveryId
from kvflow.state.packing import BLOCK_S, COPY_S_PER_BYTE, pays_off
from kvflow.state.slots import SlotPool
from kvflow.wire.messages import (
    Cancel,
    Failure,
    Goodbye,
    Message,
    Notice,
    PeerId,
    Received,
    Staged,
    StagingWindow,
    Unstage,
    Unstaged,
)
from tests.support.cores import ABORTED, DECODE, LEASE_S, PREFILL, CoreDriver, grant, messages, peer

ROOM = 7
DELIVERY = DeliveryId(ROOM, DECODE, 1)
WINDOW = StagingWindow(4096, 1024, 2)
BROKEN = Failure(FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/0", "broken")
PAUSE_S = 1.0


def greet(core: CoreDriver, other: PeerId = DECODE, window: StagingWindow | None = WINDOW) -> None:
    core(ev.PeerGreeted(other, LEASE_S, ("kv",), None, window))


def chunk(tokens: TokenRange, *, last: bool = False) -> Chunk:
    return Chunk(tokens, {"kv": tokens}, last=last)


@pytest.fixture
def core() -> CoreDriver:
    """A room of eight tokens, of which four are on their way into the first slot."""
    core = CoreDriver(PREFILL)
    greet(core)
    core(ev.SendOpened(ROOM))
    core.hear(DECODE, grant())
    core(ev.ChunkOffered(ROOM, chunk((0, 4))))
    post(core)
    return core


def post(core: CoreDriver, seq: int = 0) -> list[Effect]:
    """Take a slot as the queue does, gather, and post."""
    effects = core(ev.PlanFinished(DELIVERY, seq, 8, staged=Staged(pool(core).take(), head_major=False)))
    assert [effect.seq for effect in effects if isinstance(effect, PostPlan)] == [seq]
    return effects


def pool(core: CoreDriver) -> SlotPool:
    found = core.core.slots.pool(DECODE)
    assert found is not None
    return found


def unstaged(seq: int = 0, generation: int = 1) -> Unstaged:
    return Unstaged(room=ROOM, generation=generation, engine_rank=0, seq=seq)


def end(core: CoreDriver, failure: Failure | None = None, *, lingers: bool = False) -> list[Effect]:
    return core(ev.PostSettled(DELIVERY, 0, failure, lingers))


def keep_alive(core: CoreDriver, seconds: float) -> list[Effect]:
    """Let time pass while the decode rank goes on pinging."""
    effects: list[Effect] = []
    for _ in range(int(seconds / PAUSE_S)):
        effects += core.sleep(PAUSE_S)
        core.hear(DECODE, unstaged(seq=99))
    return effects


def test_a_slot_is_free_when_its_write_has_ended_and_it_is_not_read_any_more(core: CoreDriver) -> None:
    assert pool(core).num_free == 1
    assert end(core) == []
    assert pool(core).num_free == 1
    assert core.hear(DECODE, unstaged()) == [OfferSlots(DECODE)]
    assert pool(core).is_whole
    assert core.hear(DECODE, unstaged()) == []


def test_the_word_may_come_before_the_end_of_the_write_is_seen(core: CoreDriver) -> None:
    assert core.hear(DECODE, unstaged()) == []
    assert pool(core).num_free == 1
    assert OfferSlots(DECODE) in end(core)
    assert pool(core).is_whole


@pytest.mark.parametrize("word", [unstaged(seq=1), unstaged(generation=2)])
def test_words_about_other_notices_free_nothing(core: CoreDriver, word: Unstaged) -> None:
    end(core)
    assert core.hear(DECODE, word) == []
    assert pool(core).num_free == 1


@pytest.mark.parametrize(
    "word",
    [Received(room=ROOM, generation=1), Cancel(room=ROOM, generation=1, failure=ABORTED)],
    ids=["received", "cancel"],
)
@pytest.mark.parametrize("ends_first", [True, False])
def test_the_end_of_the_transfer_at_the_decode_rank_frees_its_slots(
    core: CoreDriver, word: Message, ends_first: bool
) -> None:
    if ends_first:
        end(core)
    core.hear(DECODE, word)
    if not ends_first:
        assert pool(core).num_free == 1
        end(core)
    assert pool(core).is_whole


def test_a_slot_that_does_not_come_back_is_asked_for_until_it_does(core: CoreDriver) -> None:
    end(core)
    effects = keep_alive(core, 8)
    asked = messages(effects, Unstage)
    assert len(asked) >= 4
    assert asked[0] == (DECODE, Unstage(room=ROOM, generation=1, engine_rank=0, seq=0))
    again = [message for _, message in messages(effects, Notice) if isinstance(message, Notice)]
    assert len(again) == len(asked)  # in case the notice was lost, and not the answer
    assert again[0].staged == Staged(0, head_major=False)
    core.hear(DECODE, unstaged())
    assert messages(keep_alive(core, 8), Unstage) == []


def test_a_slot_of_a_failed_write_is_asked_for_without_saying_that_its_bytes_are_there(core: CoreDriver) -> None:
    end(core, BROKEN)
    effects = keep_alive(core, 4)
    assert messages(effects, Unstage)
    assert not messages(effects, Notice)
    assert pool(core).num_free == 1
    core.hear(DECODE, unstaged())
    assert pool(core).is_whole


def test_a_slot_in_doubt_is_out_of_use_until_the_doubt_is_over(core: CoreDriver) -> None:
    assert OfferSlots(DECODE) in core(ev.PostDoubted(DELIVERY, 0, BROKEN))  # there is one less to wait for
    core.hear(DECODE, unstaged())
    assert (pool(core).num_free, pool(core).num_lost) == (1, 1)
    assert messages(keep_alive(core, 8), Unstage) == []
    assert OfferSlots(DECODE) in end(core, BROKEN)
    assert pool(core).is_whole


def test_a_slot_in_which_bytes_linger_is_never_used_again(core: CoreDriver) -> None:
    assert OfferSlots(DECODE) in end(core, BROKEN, lingers=True)
    core.hear(DECODE, unstaged())
    keep_alive(core, 20)
    assert (pool(core).num_free, pool(core).num_lost) == (1, 1)
    assert not pool(core).may_come or pool(core).num_free


def test_a_decode_rank_that_is_parted_with_and_returns_finds_its_slots_as_they_were(core: CoreDriver) -> None:
    end(core)
    core.sleep(LEASE_S + 1)
    assert core.core.slots.window(DECODE) is None
    assert messages(core.sleep(60.0), Unstage) == []
    greet(core)
    assert pool(core).num_free == 1
    assert messages(core.sleep(0.1), Unstage)
    core.hear(DECODE, unstaged())
    assert pool(core).is_whole


def test_another_life_of_a_decode_rank_has_slots_of_its_own(core: CoreDriver) -> None:
    greet(core, peer("decode", 0, 2))
    assert core.core.slots.pool(DECODE) is None
    found = core.core.slots.pool(peer("decode", 0, 2))
    assert found is not None
    assert found.is_whole
    end(core)
    core.hear(DECODE, unstaged())
    assert found.num_free == 2


def test_a_life_that_said_goodbye_is_forgotten(core: CoreDriver) -> None:
    end(core)
    core.hear(DECODE, Goodbye(peer=DECODE))
    assert len(core.core.slots) == 0
    assert messages(core.sleep(60.0), Unstage) == []


def test_whoever_gave_no_window_has_no_slots() -> None:
    core = CoreDriver(PREFILL)
    greet(core, window=None)
    assert core.core.slots.window(DECODE) is None
    assert core.core.slots.pool(DECODE) is None


def test_a_pool_knows_whether_a_slot_may_come() -> None:
    pool = SlotPool(2)
    assert (pool.num_free, pool.may_come, pool.is_whole) == (2, False, True)
    first, second = pool.take(), pool.take()
    assert (pool.num_free, pool.may_come) == (0, True)
    pool.lose(first)
    assert (pool.may_come, pool.num_lost) == (True, 1)
    pool.lose(second)
    assert not pool.may_come
    pool.find(first)
    pool.give_back(first)
    pool.give_back(second)
    assert (pool.num_lost, pool.is_whole) == (0, True)


def test_packing_pays_off_where_descriptors_cost_more_than_copies() -> None:
    num_bytes = 2 * 2**20
    enough = int((num_bytes * COPY_S_PER_BYTE + BLOCK_S) / 2.3e-6) + 1
    assert pays_off(num_bytes, enough, 2.3e-6)
    assert not pays_off(num_bytes, enough - 1, 2.3e-6)
    assert not pays_off(num_bytes, 10**6, 0.0)
    assert not pays_off(num_bytes, 10**6, 1.0, "never")
    assert pays_off(num_bytes, 1, 0.0, "always")
    assert not pays_off(0, 1, 1.0, "always")
