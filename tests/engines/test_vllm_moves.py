"""Running requests that move to another decode server, step by step as in vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.engines.vllm import turns
from kvflow.engines.vllm.dialect import NOTHING_KEPT
from tests.engines.test_vllm_adapter import Server, asked, servers
from tests.engines.test_vllm_turns import KEEPS, is_let_go

Pair = tuple[Server, Server]

NUM_PROMPT, NUM_TOKENS, LIMIT = 10, 14, 100
"""Tokens of the prompt, those that exist when the request is told to move, and what its client has asked for."""

BLOCKS, NEXT = [20, 21, 22, 23], [24, 25, 26, 27]
SAMPLING: Mapping[str, Any] = {
    **dict.fromkeys(("stop", "bad_words", "repetition_detection", "thinking_token_budget", "structured_outputs")),
    **{"prompt_logprobs": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "temperature": 1.0},
}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with servers(**KEEPS) as made:
        yield made


def run(server: Server, request_id: str = "r", transfer: str = "T", **values: Any) -> Any:
    """Add a request to a decode server, and compute all tokens but the last one, which is sampled."""
    request = asked(request_id, {**NOTHING_KEPT, "transfer_id": transfer}, NUM_PROMPT)
    request.sampling_params = SimpleNamespace(**{**SAMPLING, **values.pop("sampling", {})})
    request.mm_features, request.resumable, request.max_tokens = (), False, LIMIT
    request.all_token_ids = list(range(NUM_TOKENS))
    request.num_computed_tokens, request.num_output_tokens = NUM_TOKENS - 1, NUM_TOKENS - NUM_PROMPT
    vars(request).update(values)
    server.scheduler.add(request)
    assert server.scheduler.num_elsewhere(request, 0) == 0
    server.scheduler.allocated(request, [BLOCKS], 0)
    server.step({request_id: (0, NUM_TOKENS - 1, BLOCKS)})
    return request


def order(server: Server, transfer: str = "T") -> dict[str, Any] | None:
    """Tell a server that a request moves; return what it answers."""
    told = asked("order", {"kvflow_moved": transfer}, 1)
    told.all_token_ids, told.num_computed_tokens = [0, 1], 1
    server.scheduler.add(told)
    assert server.scheduler.num_elsewhere(told, 0) == 0
    is_needed, params = server.scheduler.finished(told, [[0]], is_complete=True)
    assert not is_needed
    return params


def end(server: Server, request: Any) -> None:
    """Sample the token with which a request has as many as it may have, in the step that computes the one before."""
    request.all_token_ids.append(NUM_TOKENS)
    request.num_computed_tokens += 1
    request.num_output_tokens += 1
    server.step({request.request_id: (NUM_TOKENS - 1, 1, BLOCKS)})
    server.scheduler.finished(request, [BLOCKS], is_complete=True)
    server.step(finished=[request.request_id])


def go_on(
    server: Server, params: Mapping[str, Any], tokens: Sequence[int] = range(NUM_TOKENS + 1), rest: Sequence[int] = ()
) -> int | None:
    """Add the rest of a request to another server; return how many of its tokens are received there."""
    request = asked("next", {**params, "transfer_id": "U", "kvflow_rest": list(rest)})
    request.prompt_token_ids = list(tokens)
    server.scheduler.add(request)
    server.step()
    num_elsewhere: int | None = server.scheduler.num_elsewhere(request, 0)
    server.scheduler.allocated(request, [NEXT], num_elsewhere or 0)
    server.step()
    return num_elsewhere


def moved(server: Server) -> dict[str, Any]:
    """Run a request, and stop it."""
    request = run(server)
    params = order(server)
    assert params is not None
    assert request.max_tokens == request.num_output_tokens + 1
    end(server, request)
    return params


def test_nothing_is_computed_twice_but_the_last_token(pair: Pair) -> None:
    source, target = pair
    params = moved(target)
    assert params["kvflow_max_tokens"] == LIMIT
    assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, NUM_TOKENS)
    assert [target.pool.holders[block] for block in BLOCKS] == [1] * len(BLOCKS)
    assert go_on(source, params) == NUM_TOKENS
    source.until(lambda: "next" in source.told.received)
    assert not source.told.failed
    assert source.tokens(NEXT)[:NUM_TOKENS] == list(range(1, NUM_TOKENS + 1))
    target.until(lambda: is_let_go(target))
    assert source.recomputed == []


def test_tokens_without_a_text_are_computed_again(pair: Pair) -> None:
    """As in the middle of a character: the client has not got them, and of those before, the last one is computed."""
    source, target = pair
    assert go_on(source, moved(target), range(NUM_TOKENS - 1), rest=(NUM_TOKENS - 1, NUM_TOKENS)) == NUM_TOKENS - 2
    source.until(lambda: "next" in source.told.received)
    assert not source.told.failed
    assert source.tokens(NEXT)[: NUM_TOKENS - 2] == list(range(1, NUM_TOKENS - 1))
    target.until(lambda: is_let_go(target))


@pytest.mark.parametrize("rest", [(), (90, 91), ("x",)])
def test_other_tokens_are_computed(pair: Pair, rest: Sequence[int]) -> None:
    source, target = pair
    assert go_on(source, moved(target), range(NUM_TOKENS - 1), rest) == 0
    assert not source.told.received


def test_a_finished_turn_goes_to_decode_as_well(pair: Pair) -> None:
    """A prompt may begin with what a ticket covers, whoever passes it on."""
    source, target = pair
    assert go_on(source, moved(target), range(NUM_TOKENS + 3)) == NUM_TOKENS
    source.until(lambda: "next" in source.told.received)
    assert not source.told.failed


@pytest.mark.parametrize(
    "values",
    [
        {"sampling": {"stop": ["x"]}},
        {"sampling": {"bad_words": ["x"]}},
        {"sampling": {"presence_penalty": 0.1}},
        {"sampling": {"frequency_penalty": 0.1}},
        {"sampling": {"structured_outputs": {"json": {}}}},
        {"sampling": {"seed": 0}},
        {"mm_features": ["image"]},
        {"resumable": True},
        {"num_output_tokens": 0},
        {"max_tokens": NUM_TOKENS - NUM_PROMPT + 1},
        {"request_id": "0_r"},
    ],
    ids=str,
)
def test_what_would_be_answered_otherwise_stays(pair: Pair, values: Any) -> None:
    _, target = pair
    request = run(target, **values)
    limit = request.max_tokens
    assert order(target) is None
    assert request.max_tokens == limit


def test_a_seed_does_not_matter_without_chance(pair: Pair) -> None:
    run(pair[1], sampling={"seed": 7, "temperature": 0.0})
    assert order(pair[1]) is not None


def test_what_has_ended_or_was_never_here_stays(pair: Pair) -> None:
    """What asks for it is no prompt that is computed here, and no turn."""
    _, target = pair
    end(target, run(target))
    before = list(target.recomputed)
    assert [order(target), order(target, "other")] == [None, None]
    target.scheduler.turns.give_up_all()
    target.until(lambda: is_let_go(target))
    assert target.recomputed == before


def test_a_request_that_is_sent_a_second_time(pair: Pair) -> None:
    _, target = pair
    first = run(target, "first")
    run(target, "second")
    target.scheduler.finished(first, [BLOCKS], is_complete=False, status="FINISHED_ABORTED")
    params = order(target)
    assert params is not None
    assert params["remote_request_id"] == "second"


def test_nothing_is_remembered_of_what_has_ended(pair: Pair) -> None:
    _, target = pair
    params = moved(target)
    assert go_on(pair[0], params) == NUM_TOKENS
    end(target, run(target, "turn", "S"))
    target.until(lambda: sum(target.pool.holders) == len(BLOCKS))
    target.scheduler.turns.give_up_all()
    target.until(lambda: is_let_go(target))
    kept = {**vars(target.scheduler.turns), **vars(target.scheduler.moves)}
    tables = ("_until", "_moved", "_named", "_given_up", "_by_room", "_waiting", "_running", "_stopped", "_params")
    assert not [name for name in tables if kept[name]]


def test_servers_that_keep_nothing_move_nothing() -> None:
    with servers() as (_, target):
        request = run(target)
        assert order(target) is None
        assert request.max_tokens == LIMIT


def test_what_nobody_asks_for_is_given_up(pair: Pair) -> None:
    """As when the client has left meanwhile."""
    _, target = pair
    moved(target)
    target.scheduler.add(asked("w", {"kvflow_withdrawn": "T"}, 1))
    target.until(lambda: is_let_go(target))


def test_it_is_kept_although_others_lack_blocks_but_not_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair
    moved(target)
    for _ in range(3):
        target.scheduler.sending.shortage.wants_blocks("other")
        target.step()
    assert not is_let_go(target)
    monkeypatch.setattr(turns, "MOVE_S", 0.0)
    request = run(target, "s", "S")
    assert order(target, "S") is not None
    end(target, request)
    target.until(lambda: sum(target.pool.holders) == len(BLOCKS))


def test_a_client_that_leaves_before_it_has_stopped(pair: Pair) -> None:
    _, target = pair
    request = run(target)
    assert order(target) is not None
    target.scheduler.finished(request, [BLOCKS], is_complete=False, status="FINISHED_ABORTED")
    target.step(finished=["r"])
    assert is_let_go(target)
    assert order(target) is None


@pytest.mark.parametrize("lacks", ["nothing", "a place in the queue", "blocks"])
def test_a_full_server_makes_place_for_the_order(pair: Pair, lacks: str) -> None:
    """Otherwise the order would wait for one of the requests that it is to move; but no request waits for its order."""
    _, target = pair
    request = run(target)
    target.scheduler.moves._max_running = 1
    if lacks == "a place in the queue":
        target.scheduler.add(asked("other", None))
    if lacks == "blocks":
        target.pool.touch(target.pool.blocks)
    told = asked("order", {"kvflow_moved": "T"}, 1)
    target.scheduler.add(told)
    assert (request.max_tokens < LIMIT) is (lacks == "nothing")
    _, params = target.scheduler.finished(told, [[0]], is_complete=True)
    assert params is not None
    assert params["kvflow_max_tokens"] == LIMIT
    assert request.max_tokens == request.num_output_tokens + 1
