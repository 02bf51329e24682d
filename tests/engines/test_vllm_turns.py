"""Conversations: prefill receives the turn before from decode, and hands the next one over, step by step as in vLLM."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvflow import KvflowError
from kvflow.engines.vllm import receiving
from kvflow.engines.vllm.dialect import NOTHING_KEPT, take_prefix, take_reference
from kvflow.engines.vllm.groups import describe_groups
from kvflow.engines.vllm.scheduler import ConnectorScheduler
from tests.engines.test_vllm_adapter import (
    BLOCK,
    BLOCKS,
    PROMPT,
    Pool,
    Server,
    asked,
    group,
    mamba,
    reply_of,
    servers,
)

Pair = tuple[Server, Server]

TURN, NEXT = 14, 21
"""Tokens that are computed in the first turn, and those of the prompt of the second one."""

DECODE, LATER = [20, 21, 22, 23], [24, 25, 26, 27, 28, 29]
"""Blocks of the two turns on decode."""

SECOND = [14, 5, 16, 9, 11, 2]
"""Blocks of the second turn on prefill."""

KEEPS: Mapping[str, Any] = {"keep_turns_s": 60.0}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with servers(**KEEPS) as made:
        yield made


def turn(server: Server, request_id: str = "d", blocks: Any = DECODE, **values: Any) -> dict[str, Any] | None:
    """Compute a turn on decode, whose last token is sampled; return the answer's parameters for the router."""
    request = asked(request_id, NOTHING_KEPT)
    request.num_computed_tokens, request.all_token_ids = TURN, list(range(TURN + 1))
    vars(request).update(values)
    server.scheduler.add(request)
    assert server.scheduler.num_elsewhere(request, 0) == 0
    tables = blocks if isinstance(blocks[0], list) else [blocks]
    server.scheduler.allocated(request, tables, 0)
    server.step({request_id: (0, TURN, blocks)})
    is_needed, params = server.scheduler.finished(request, tables, is_complete=True)
    assert not is_needed  # vLLM would step until the turn is given up
    server.step(finished=[request_id])
    return params


def begin_next(server: Server, params: Mapping[str, Any] | None, num_tokens: int = NEXT, num_local: int = 0) -> Any:
    """Add the second turn to prefill, with the answer of the first one."""
    request = asked("p", params, num_tokens)
    server.scheduler.add(request)
    server.step()
    num_elsewhere = server.scheduler.num_elsewhere(request, num_local)
    assert num_elsewhere is not None
    server.scheduler.allocated(request, [SECOND], num_elsewhere)
    server.step()
    return request


def is_let_go(server: Server) -> bool:
    return not any(server.pool.holders)


@pytest.mark.parametrize("num_local", [0, 8])
def test_prefill_receives_what_it_lacks_of_a_turn_and_hands_on_the_next(pair: Pair, num_local: int) -> None:
    source, target = pair
    params = turn(target)
    assert params is not None
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == TURN  # the last token was sampled, but not computed
    request = begin_next(source, params, num_local=num_local)
    source.until(lambda: "p" in source.told.received)
    assert not source.told.failed
    skipped = num_local // BLOCK
    assert source.tokens(SECOND[skipped:4])[: TURN - num_local] == list(range(num_local + 1, TURN + 1))
    assert not any(source.tokens(SECOND[:skipped]))
    target.until(lambda: is_let_go(target))

    for token in range(num_local):  # what prefill has in its prefix cache
        source.cells[:, SECOND[token // BLOCK], :, token % BLOCK] = token + 1
    source.step({"p": (TURN, NEXT - TURN, SECOND)})
    is_needed, following = source.scheduler.finished(request, [SECOND], is_complete=True)
    assert is_needed
    assert following is not None
    source.step(finished=["p"])
    later = asked("later", following, NEXT)
    target.scheduler.add(later)
    target.step()
    assert target.scheduler.num_elsewhere(later, 12) == NEXT - 1 - 12
    target.scheduler.allocated(later, [LATER], NEXT - 1 - 12)
    target.until(lambda: "later" in target.told.received)
    assert not target.told.failed
    assert target.tokens(LATER[3:])[: NEXT - 1 - 12] == list(range(13, NEXT))
    source.until(lambda: "p" in source.told.sent)
    source.scheduler.sending.take_sent(["p"])
    assert is_let_go(source)


def test_vllm_does_not_wait_for_a_turn_that_is_kept(pair: Pair) -> None:
    """It sleeps, or computes others as fast as without it; the blocks are out of its pool."""
    _, target = pair
    assert turn(target) is not None
    assert [target.pool.holders[block] for block in DECODE] == [1] * len(DECODE)
    assert not target.worker.is_moving
    assert not target.scheduler.awaits_report
    assert not target.told.sent


def test_prompt_that_does_not_begin_with_the_turn_is_computed(pair: Pair) -> None:
    """As when the client has left out what a model thought; decode gets its blocks back at once."""
    source, target = pair
    params = turn(target, all_token_ids=[*range(PROMPT), *range(90, 95)])
    begin_next(source, params)
    assert not source.told.received
    target.until(lambda: is_let_go(target))


@pytest.mark.parametrize("num_tokens", [TURN, PROMPT])
def test_prompt_that_adds_nothing_to_the_turn_is_computed(pair: Pair, num_tokens: int) -> None:
    source, target = pair
    begin_next(source, turn(target), num_tokens)
    assert not source.told.received
    target.until(lambda: is_let_go(target))


def test_turn_is_not_taken_for_another_one(pair: Pair) -> None:
    """Even with parameters that are made to match the prompt: decode says what its blocks were computed from."""
    source, target = pair
    params = turn(target, all_token_ids=[*range(8), *range(90, 97)]) or {}
    matching = turn(target, "same", [1, 2, 3, 4], num_computed_tokens=8) or {}
    changes = {name: matching[name] for name in ("remote_num_tokens", "kvflow_prompt")}
    begin_next(source, {**params, **changes})
    source.until(lambda: "p" in source.told.received)
    assert source.told.failed == {"p"}
    assert source.recomputed == [("another_prompt", 8)]


@pytest.mark.parametrize("found", [None, 0, "14"])
def test_turn_of_an_unusable_length_is_computed(found: object) -> None:
    with pytest.raises(KvflowError, match="number of tokens"):
        take_prefix({"kvflow_ticket": {}, "kvflow_prompt": "", "remote_num_tokens": found})


@pytest.mark.parametrize(
    ("request_id", "values"),
    [
        ("d", {"kv_transfer_params": None}),
        ("d", {"kv_transfer_params": {"kvflow_withdrawn": "room"}}),
        ("d", {"prompt_token_ids": None}),
        ("0_d", {}),
        ("cmpl-x-1-0123abcd", {}),
    ],
    ids=["not asked for", "withdrawal", "embeddings", "one of n", "later prompt of a batch"],
)
def test_turns_without_a_ticket_are_not_kept(pair: Pair, request_id: str, values: dict[str, Any]) -> None:
    _, target = pair
    assert turn(target, request_id, **values) is None
    assert is_let_go(target)


def test_a_router_asks_for_a_turn_by_the_name_of_its_request(pair: Pair) -> None:
    """As for a stream, which ends without parameters."""
    _, target = pair

    def found(transfer: str) -> dict[str, Any] | None:
        question = asked("q", {"kvflow_kept": transfer}, 1)
        target.scheduler.add(question)
        assert target.scheduler.num_elsewhere(question, 0) == 0
        is_needed, params = target.scheduler.finished(question, [[0]], is_complete=True)
        assert not is_needed
        return params

    turn(target, "unnamed", [1, 2, 3, 4])
    params = turn(target, kv_transfer_params={**NOTHING_KEPT, "transfer_id": "T"})
    assert params is not None
    assert [found("T"), found("other")] == [params, None]
    target.scheduler.turns.give_up_all()
    assert found("T") is None
    target.until(lambda: is_let_go(target))


def test_turn_is_not_kept_if_another_connector_answers(pair: Pair) -> None:
    _, target = pair
    target.scheduler.answers.is_shared = True
    assert turn(target) is None
    assert is_let_go(target)


def test_turn_that_its_client_has_left_is_not_kept(pair: Pair) -> None:
    _, target = pair
    request = asked("d", NOTHING_KEPT)
    target.scheduler.add(request)
    target.step({"d": (0, TURN, DECODE)})
    assert target.scheduler.finished(request, [DECODE], is_complete=False) == (False, None)
    assert is_let_go(target)


def test_servers_without_the_option_keep_and_receive_no_turns() -> None:
    with servers() as (source, target), servers(**KEEPS) as (_, keeps):
        assert turn(target) is None
        begin_next(source, turn(keeps))
        assert not source.told.received


def test_recurrent_states_are_not_kept(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """They move on with each token; with asynchronous scheduling, vLLM has computed one more by then."""
    caplog.set_level("WARNING", "vllm.kvflow")
    groups = describe_groups([group(layers=[0]), mamba()])
    scheduler = ConnectorScheduler(groups, is_prefill=True, is_decode=True, keep_turns_s=60.0)
    scheduler.held.pool = Pool()
    scheduler.answers.take_tickets([reply_of(pair[0])["kvflow_ticket"]])
    for number in range(2):
        request = asked(f"d{number}", NOTHING_KEPT)
        request.num_computed_tokens, request.all_token_ids = TURN, list(range(TURN + 1))
        assert scheduler.finished(request, [DECODE, [3]], is_complete=True) == (False, None)
    (record,) = caplog.records
    assert "turns are not kept: this model has recurrent states" in record.message


def test_window_of_a_turn_is_received() -> None:
    """The blocks behind the window are gone on decode; prefill needs what the first token of the next turn sees."""
    window = 5
    groups = [group(layers=[0]), group("SlidingWindowSpec", [1, 2], sliding_window=window)]
    with servers(*groups, **KEEPS) as (source, target):
        params = turn(target, blocks=[DECODE, [0, 0, 9, 10]])
        assert [target.pool.holders[block] for block in (0, 9, 10)] == [0, 1, 1]
        request = asked("p", params, NEXT)
        source.scheduler.add(request)
        source.step()
        assert source.scheduler.num_elsewhere(request, 0) == TURN
        source.scheduler.allocated(request, [SECOND, [0, 0, 17, 18, 19, 30]], TURN)
        source.until(lambda: "p" in source.told.received)
        assert not source.told.failed
        assert source.tokens(SECOND[:4], [0])[:TURN] == list(range(1, TURN + 1))
        seen = TURN + 1 - window  # the first token that token 14 sees
        assert source.tokens([17, 18], [1, 2])[seen - 8 : TURN - 8] == list(range(seen + 1, TURN + 1))
        target.until(lambda: is_let_go(target))


def test_turn_is_given_up_when_it_is_overdue(pair: Pair) -> None:
    _, target = pair
    assert turn(target) is not None
    target.step()
    assert not is_let_go(target)
    target.scheduler.turns.order_step(is_short=False, now=time.monotonic() + 61.0)
    target.until(lambda: is_let_go(target))


@pytest.mark.parametrize("why", ["waits for blocks", "was preempted"])
def test_older_turns_are_given_up_for_requests_that_lack_blocks(pair: Pair, why: str) -> None:
    source, target = pair
    blocks = [[4 * number + 1 + it for it in range(4)] for number in range(3)]
    answers = [turn(target, f"turn{number}", table) for number, table in enumerate(blocks)]
    if why == "waits for blocks":
        target.scheduler.num_elsewhere(asked("waits", None), 0)
        target.step()
    else:
        target.step(preempted=["other"])
    target.until(lambda: not any(target.pool.holders[it] for it in blocks[0] + blocks[1]))
    assert all(target.pool.holders[it] for it in blocks[2])
    begin_next(source, answers[2])
    source.until(lambda: "p" in source.told.received)
    assert not source.told.failed


def test_turns_have_a_share_of_the_pool(pair: Pair) -> None:
    _, target = pair
    share = BLOCKS // 2 // len(DECODE)
    for number in range(share + 2):
        blocks = [(number * len(DECODE) + it) % (BLOCKS - 1) + 1 for it in range(len(DECODE))]
        assert turn(target, f"turn{number}", blocks) is not None
    target.until(lambda: sum(target.pool.holders) == share * len(DECODE))
    values = {"num_computed_tokens": BLOCK * BLOCKS, "all_token_ids": list(range(BLOCK * BLOCKS + 1))}
    assert turn(target, "whole pool", list(range(BLOCKS)), **values) is None
    target.step()
    assert sum(target.pool.holders) == share * len(DECODE)


def test_turns_are_given_up_before_vllm_goes_to_sleep(pair: Pair) -> None:
    """Also before its weights change: what was computed with the old ones must not be used."""
    source, target = pair
    params = turn(target)
    target.scheduler.reset()
    target.until(lambda: is_let_go(target))
    begin_next(source, params)
    source.until(lambda: "p" in source.told.received)
    assert source.told.failed == {"p"}


def test_turn_is_let_go_when_all_workers_have() -> None:
    with servers(**KEEPS) as (_, target):
        target.scheduler.turns._num_workers = 2
        assert turn(target) is not None
        target.scheduler.turns.give_up_all()
        target.step()
        target.until(lambda: target.scheduler.turns._num_released == {"d": 1})
        assert not is_let_go(target)
        target.scheduler.turns.take_released(["d"])
        assert is_let_go(target)


def test_request_that_is_aborted_while_its_turn_is_received(pair: Pair) -> None:
    source, target = pair
    request = begin_next(source, turn(target))
    assert source.scheduler.finished(request, [SECOND], is_complete=False, status="FINISHED_ABORTED") == (False, None)
    source.step(finished=["p"])
    source.until(lambda: "p" in source.told.received and source.is_idle())
    target.until(lambda: is_let_go(target))


@pytest.mark.parametrize("how", ["used before", "server is gone"])
def test_turn_that_is_gone_is_computed(pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "PREFIX_S", 0.5)
    source, target = pair
    params = turn(target)
    if how == "used before":
        begin_next(source, params)
        source.until(lambda: "p" in source.told.received)
        source.told.received.clear()
        source.scheduler.finished(asked("p", None), [SECOND], is_complete=False)
        source.step(finished=["p"])
    else:
        target.worker.close()
    request = begin_next(source, params)
    source.until(lambda: "p" in source.told.received)
    assert source.told.failed == {"p"}
    assert source.recomputed[-1][1] == TURN
    source.step({"p": (0, NEXT, SECOND)})
    is_needed, following = source.scheduler.finished(request, [SECOND], is_complete=True)
    assert is_needed
    assert take_reference(following) is not None


def test_requests_of_one_turn_wait_for_the_first(pair: Pair) -> None:
    """With `n` > 1, the others find its blocks in the prefix cache."""
    source, target = pair
    params = turn(target)
    first, second = (asked(f"{number}_p", params, NEXT) for number in range(2))
    for request in (first, second):
        source.scheduler.add(request)
    assert source.scheduler.num_elsewhere(first, 0) == TURN
    assert source.scheduler.num_elsewhere(second, 0) is None
    source.scheduler.allocated(first, [SECOND], TURN)
    source.until(lambda: first.request_id in source.told.received)
    source.scheduler.receiving.take_received(source.told.received)
    assert source.scheduler.num_elsewhere(second, 12) == 0
