"""Requests and settings that the adapter refuses."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import kvflow
from kvflow import ConfigError, LayoutError, LocalProtocolError, Outcome, PlanError, RemoteProtocolError, TicketError
from kvflow.engines.transformers.engine import ALLOCATOR_NAMES, NAMES, VERSIONS, _check_names
from kvflow.engines.transformers.memory import CacheMap
from kvflow.engines.transformers.metadata import FirstToken, read_first_token
from kvflow.engines.transformers.prefill import PrefillManager
from kvflow.testing.adapter import SideName
from tests.engines.transformers.models import make_manager, prompt
from tests.engines.transformers.pair import Pair

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
CONFIG = kvflow.PrefillConfig(instance="prefill", backend="memory")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


def test_bad_requests_are_refused_and_harm_nobody(pair: Pair) -> None:
    tokens = prompt(0, 45)
    ticket = pair.prefill(tokens, "twice")
    with pytest.raises(LocalProtocolError, match="room is in use"):
        pair.prefill(tokens, "twice")
    with pytest.raises(LocalProtocolError, match="prompt is empty"):
        pair.prefill([], "empty")
    with pytest.raises(LocalProtocolError):
        pair.prefill(tokens, "")
    with pytest.raises(TicketError):
        pair.decode(tokens, {})
    for wrong in ([], prompt(0, 64 * 8)):  # room for one more token is needed
        with pytest.raises(PlanError, match="does not fit"):
            pair.decode(wrong, ticket)
    pair.decode(tokens, ticket)
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.decode(tokens, ticket)
    assert pair.result("twice") == pair.reference(tokens)


@pytest.mark.parametrize("settings", [{"bogus": 3}, {"max_new_tokens": 4}], ids=["unknown", "not to be set"])
def test_settings_that_prefill_cannot_use_end_the_request_on_both_sides(pair: Pair, settings: dict[str, int]) -> None:
    tokens, room = prompt(5, 45), f"prefill {settings}"
    with pytest.raises((ConfigError, TypeError)):
        pair.prefill_end.add_request(tokens, room, **settings)
    assert not pair.prefill_end.is_busy
    pair.decode(tokens, pair.prefill(tokens, room))
    assert pair.result(room) == pair.reference(tokens)


def test_settings_that_decode_cannot_use_are_refused(pair: Pair) -> None:
    """The next request succeeds."""
    tokens = prompt(6, 45)
    ticket = pair.prefill(tokens, "decode")
    with pytest.raises(ConfigError, match="cannot be used"):
        pair.decode(tokens, ticket, bogus=3)
    pair.decode(tokens, ticket)
    assert pair.result("decode") == pair.reference(tokens)


def test_settings_of_a_wrong_type_are_refused() -> None:
    manager = make_manager(samples=True, per_request_processors=True)
    with PrefillManager(manager, CONFIG, fingerprint="x") as end:
        manager.start()
        with pytest.raises(ConfigError, match="temperature"):
            end.add_request(prompt(0, 20), "room", temperature="hot")
        manager.stop(hard_stop=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_id_of_another_request_of_the_manager_is_refused(pair: Pair, side: SideName) -> None:
    """Otherwise the other request's cache would be sent or overwritten."""
    manager = pair.end(side).engine.manager
    with manager.pause():  # the request stays in the input queue
        manager.add_request(prompt(1, 30), request_id=f"own {side}")
        tokens, ticket = prompt(2, 30), pair.prefill_end.rank.ticket("own decode")
        with pytest.raises(LocalProtocolError, match="in use"):
            pair.prefill(tokens, "own prefill") if side == "prefill" else pair.decode(tokens, ticket)


def test_request_of_the_manager_cannot_take_the_id_of_one_under_way(pair: Pair) -> None:
    """Otherwise the cache of the new request would be sent, or overwritten by what arrives."""
    tokens, other = prompt(7, 100), prompt(8, 30)
    with pair.prefill_end.engine.manager.pause(), pair.decode_end.engine.manager.pause():
        pair.decode(tokens, pair.prefill(tokens, "taken"))
        for end in (pair.prefill_end, pair.decode_end):
            with pytest.raises(LocalProtocolError, match="in use"):
                end.engine.manager.add_request(other, request_id="taken")
    assert pair.result("taken") == pair.reference(tokens)


@pytest.mark.slow
def test_manager_that_was_restarted_takes_no_requests() -> None:
    with Pair() as pair:
        manager = pair.prefill_end.engine.manager
        manager.stop()
        manager.start()
        with pytest.raises(LocalProtocolError, match="restarted"):
            pair.prefill(prompt(0, 45), "late")


def test_generation_loop_that_fails_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On decode before the pages have arrived, and on prefill before the prompt is computed."""
    with Pair() as pair, monkeypatch.context() as patch:
        tokens = prompt(0, 45)
        ticket = pair.prefill_end.rank.ticket("never computed")
        sender = pair.prefill_end.rank.send("never computed")
        pair.decode(tokens, ticket)
        patch.setattr(pair.decode_end, "step", fail)
        pair.decode_end.engine.wake()
        assert "on purpose" in pair.output("never computed").error
        assert sender.wait(20) is Outcome.FAILED
        with pair.prefill_end.engine.manager.pause():
            left = pair.prefill_end.add_request(tokens, "left").sender
            patch.setattr(pair.prefill_end, "step", fail)
        assert left.wait(20) is Outcome.ABORTED
        assert not pair.prefill_end.is_busy


def test_output_that_nobody_can_take_any_more_fails_no_other_request(pair: Pair) -> None:
    """Its client's event loop has been closed; the first output is delivered when the cache has arrived."""
    loop = asyncio.new_event_loop()
    loop.close()
    router = pair.decode_end.engine.processor.output_router
    router.result_handlers["gone"] = (print, loop)
    tokens = prompt(9, 30)
    with pair.prefill_end.engine.manager.pause():
        other = pair.prefill(tokens, "other")
        pair.decode(tokens, pair.prefill(tokens, "gone"), max_tokens=1)
        pair.decode(tokens, other)
    assert pair.result("other") == pair.reference(tokens)
    del router.result_handlers["gone"]


def fail() -> None:
    raise RuntimeError("on purpose")


def test_first_token_may_end_the_output(pair: Pair) -> None:
    tokens = prompt(3, 40)
    expected = pair.reference(tokens)[:1]
    pair.decode(tokens, pair.prefill(tokens, "end"), eos_token_id=expected)
    assert pair.result("end") == expected


def test_metadata_that_is_no_token_fails_its_request_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(4, 40)
    with monkeypatch.context() as patch:
        patch.setattr(FirstToken, "to_bytes", lambda _: b'{"token": 100000}')
        pair.decode(tokens, pair.prefill(tokens, "wrong"))
        assert "not in the vocabulary" in pair.output("wrong").error
    pair.decode(tokens, pair.prefill(tokens, "right"))
    assert pair.result("right") == pair.reference(tokens)


@pytest.mark.parametrize("metadata", [b"", b"[]", b'{"token": "x"}', b'{"token": -1}', b'{"token": 10}'])
def test_no_first_token(metadata: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_first_token(metadata, vocab_size=10)


def test_first_token_travels() -> None:
    assert read_first_token(FirstToken(7, -0.5).to_bytes(), 10) == FirstToken(7, -0.5)


def test_managers_that_are_not_served() -> None:
    with pytest.raises(ConfigError, match="use_async_batching"):
        PrefillManager(make_manager(use_async_batching=True), CONFIG, fingerprint="x")
    manager = make_manager()
    manager.start()
    with pytest.raises(LocalProtocolError, match="before `start`"):
        PrefillManager(manager, CONFIG, fingerprint="x")
    manager.stop(hard_stop=True)


def test_extras_install_the_version_that_is_served() -> None:
    """The extras of the adapter and of the demo."""
    found = re.findall(r'"transformers([=<>][^"]*)"', PROJECT.read_text())
    first, last = VERSIONS[0], VERSIONS[-1].split(".")
    assert found == [f">={first},<{last[0]}.{int(last[1]) + 1}"] * 2


class Without:
    """An object that lacks one of its attributes, given by its path."""

    def __init__(self, real: Any, path: str) -> None:
        self._real, self._path = real, path

    def __getattr__(self, name: str) -> Any:
        head, _, rest = self._path.partition(".")
        if name == head and not rest:
            raise AttributeError(name)
        found = getattr(self._real, name)
        return Without(found, rest) if name == head else found


def test_names_that_a_version_of_transformers_lacks_are_named() -> None:
    manager = make_manager("mixed")
    manager.warmup()
    _check_names(manager)
    for path in NAMES.split():
        with pytest.raises(ConfigError, match=re.escape(path)):
            _check_names(Without(manager, path))
    allocators = manager.batch_processor.cache.cache_allocators
    for name in ALLOCATOR_NAMES.split():
        kind = next(iter(allocators))
        manager.batch_processor.cache.cache_allocators = allocators | {kind: Without(allocators[kind], name)}
        with pytest.raises(ConfigError, match=f"{kind}.{name}"):
            _check_names(manager)


def test_caches_that_are_not_moved() -> None:
    class Cache:
        cache_allocators: dict[str, Any] = {"linear_attention": None}  # noqa: RUF012 - as the real one

    with pytest.raises(LayoutError, match="linear_attention"):
        CacheMap(Cache(), "x")


def test_end_that_is_closed_leaves_the_manager_as_it_was() -> None:
    manager = make_manager()
    with PrefillManager(manager, CONFIG, fingerprint="x") as end:
        manager.start()
    with pytest.raises(LocalProtocolError):
        end.add_request(prompt(0, 20), "late")
    manager.add_request(prompt(0, 20))
    assert len(manager.get_result(timeout=20).generated_tokens) == 24
    manager.stop()
