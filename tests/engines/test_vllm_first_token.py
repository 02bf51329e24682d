"""The token that prefill samples travels with the handover, if vLLM can begin with the second one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow import ticket_for_room
from kvflow.engines.vllm.dialect import digest_of
from kvflow.engines.vllm.first_token import FirstTokens, SampledToken, split_metadata
from tests.engines.test_vllm_adapter import DECODE, PREFILL, PROMPT, Server, asked, begin_decode, group, servers

TOKEN, VOCABULARY = 42, 100
REQUEST = {"do_remote_decode": True}


class Sampling(msgspec.Struct):
    """The part of vLLM's `SamplingParams` that is looked at."""

    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    stop: list[str] | None = None
    stop_ids: set[int] = msgspec.field(default_factory=set)
    extra_args: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def sampled(request_id: str, params: Mapping[str, Any], sampling: Sampling, tokens: list[int] | None = None) -> Any:
    request = asked(request_id, params)
    vars(request).update(
        sampling_params=sampling,
        max_tokens=sampling.max_tokens,
        resumable=False,
        output_token_ids=[TOKEN] if tokens is None else tokens,
        last_logprobs=None,
    )
    return request


def logprobs_of(*tokens: int) -> Any:
    """Make vLLM's `LogprobsLists` of one position."""
    values = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 3
    return SimpleNamespace(
        logprob_token_ids=np.array([tokens]), logprobs=values[None], sampled_token_ranks=np.array([1])
    )


@contextmanager
def passing(*groups: Any, settings: tuple[str, str] = ("", "")) -> Iterator[tuple[Server, Server]]:
    """Run two servers whose vLLM can begin with the second token."""
    first_tokens = [FirstTokens(text, VOCABULARY) for text in settings]
    with servers(*groups, first_tokens=first_tokens) as made:
        yield made


def compute(source: Server, sampling: Sampling, *, tokens: list[int] | None = None, logprobs: Any = None) -> Any:
    """Compute a prompt, and sample; return the reply."""
    request = sampled("p", REQUEST, msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0), tokens)
    request.last_logprobs = logprobs
    source.scheduler.add(request)
    source.step({"p": (0, PROMPT, PREFILL)})
    _, params = source.scheduler.finished(request, (), is_complete=True)
    source.step(finished=["p"])
    return params


def receive(target: Server, params: Mapping[str, Any], sampling: Sampling) -> SampledToken | None:
    """Receive a request, and return the token with which vLLM would begin."""
    begin_decode(target, params)
    target.until(lambda: "d" in target.told.received)
    assert not target.told.failed
    assert target.first_tokens is not None
    return target.first_tokens.take_token(sampled("d", params, sampling, []))


def announced(target: Server) -> Any:
    """Add a request to decode that names a ticket of its prompt."""
    request = asked("d", {"do_remote_prefill": True, "kvflow_ticket": {}})
    request.kv_transfer_params["kvflow_prompt"] = digest_of(request)
    target.scheduler.add(request)
    return request


def test_decode_receives_all_of_the_prompt_and_the_token() -> None:
    sampling = Sampling(seed=3, stop=["end"], extra_args={"kv_transfer_params": {}})
    with passing() as (source, target):
        first = receive(target, compute(source, sampling), msgspec.structs.replace(sampling, stop=[], extra_args=None))
        assert (first and (first.token, first.logprobs)) == (TOKEN, None)
        assert target.tokens(DECODE)[:PROMPT] == list(range(1, PROMPT + 1))
        source.until(lambda: "p" in source.told.sent)
        source.until(lambda: not any(source.pool.holders))
        assert target.first_tokens is not None
        assert target.first_tokens.take_token(sampled("d", {}, sampling, [])) is None, "it was taken twice"


def test_logprobs_travel_as_they_are() -> None:
    """Another request of the step may have asked for more of them."""
    logprobs = logprobs_of(TOKEN, 7, 8, 9)
    with passing() as (source, target):
        first = receive(target, compute(source, Sampling(logprobs=2), logprobs=logprobs), Sampling(logprobs=2))
        assert first is not None
        assert first.logprobs is not None
        tokens, values, rank = first.logprobs
        assert (tokens, rank) == ([TOKEN, 7, 8], 1)
        assert np.array(values, np.float32).tolist() == logprobs.logprobs[0, :3].tolist()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Sampling(temperature=0.5), Sampling()),
        (Sampling(min_tokens=2), Sampling()),
        (Sampling(logprobs=1), Sampling()),
        (Sampling(seed=1), Sampling(seed=2)),
        (Sampling(extra_args={"thinking": 1}), Sampling()),
    ],
    ids=["temperature", "min_tokens", "logprobs", "seed", "arguments of plug-ins"],
)
def test_a_token_that_decode_may_not_sample_is_not_taken(here: Sampling, there: Sampling) -> None:
    """Routers ask prefill without `min_tokens`, for example. vLLM computes the prompt's last token again."""
    with passing() as (source, target):
        assert receive(target, compute(source, there, logprobs=logprobs_of(TOKEN, 1)), here) is None


@pytest.mark.parametrize(
    ("tokens", "logprobs", "sampling"),
    [
        ([], None, Sampling()),
        ([1, 2], None, Sampling()),
        ([VOCABULARY], None, Sampling()),
        ([TOKEN], None, Sampling(logprobs=1)),
        ([TOKEN], logprobs_of(*range(10_000)), Sampling(logprobs=-1)),
    ],
    ids=["none sampled", "two sampled", "not in the vocabulary", "its logprobs are unknown", "too many logprobs"],
)
def test_requests_without_a_usable_token_are_handed_over(tokens: list[int], logprobs: Any, sampling: Sampling) -> None:
    with passing() as (source, target):
        assert receive(target, compute(source, sampling, tokens=tokens, logprobs=logprobs), sampling) is None


def test_servers_that_sample_differently_do_not_take_tokens() -> None:
    with passing(settings=("raw_logprobs", "processed_logprobs")) as (source, target):
        assert receive(target, compute(source, Sampling()), Sampling()) is None


def test_what_is_not_a_token_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    received = FirstTokens("", VOCABULARY)
    received.keep([("d", b"\xc1")])
    assert received.take_token(sampled("d", {}, Sampling(), [])) is None
    assert "d samples its first token" in caplog.text


def test_windows_need_the_token_before() -> None:
    """Without a first token, vLLM computes the last token of the prompt, whose window reaches back one token more."""
    window = group("SlidingWindowSpec", layers=[0], sliding_window=4)
    with passing(window, group(layers=[1, 2])) as (_, target):
        assert target.scheduler.num_elsewhere(announced(target), 0) == PROMPT - 1


@pytest.mark.parametrize("num_local", [PROMPT - 2, PROMPT - 1])
def test_a_last_token_alone_is_not_waited_for(num_local: int) -> None:
    with passing() as (_, target):
        assert target.scheduler.num_elsewhere(announced(target), num_local) == (2 if num_local == PROMPT - 2 else 0)


def test_a_request_that_is_aborted_before_its_token_is_sampled_is_not_handed_over() -> None:
    with passing() as (source, target):
        request = sampled("p", REQUEST, Sampling(max_tokens=1))
        source.scheduler.add(request)
        source.step({"p": (0, PROMPT, PREFILL)})
        assert source.scheduler.answers.ticket is not None
        ticket = ticket_for_room(source.scheduler.answers.ticket, "p", None)
        begin_decode(target, {"do_remote_prefill": True, "kvflow_ticket": ticket, "kvflow_prompt": digest_of(request)})
        source.scheduler.finished(request, (), is_complete=False, status="FINISHED_ABORTED")
        source.step(finished=["p"])
        target.until(lambda: "d" in target.told.failed)
        source.until(lambda: not any(source.pool.holders))


def test_a_prompt_that_is_loaded_and_computed_in_one_step_comes_without_its_token() -> None:
    """What a load brings is sent when the request ends."""
    with passing() as (source, target):
        request = sampled("p", REQUEST, Sampling(max_tokens=1))
        source.scheduler.add(request)
        source.scheduler.num_elsewhere(request, 0)
        source.step({"p": (4, PROMPT - 4, PREFILL)}, loads=True)
        _, params = source.scheduler.finished(request, [PREFILL], is_complete=True)
        source.step(finished=["p"])
        assert receive(target, params or {}, Sampling()) is None


def test_metadata_without_a_token_is_that_of_today() -> None:
    request = asked("p", None)
    assert split_metadata(digest_of(request).encode()) == (digest_of(request), b"")
