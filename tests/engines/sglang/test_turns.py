"""Conversations whose finished turns go back from decode to prefill, through SGLang's own queues and radix cache.

The model is small, but a wrong page changes its text.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.processes import Process, free_port
from tests.engines.sglang.test_conformance import PAGE_BYTES

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SETTINGS = {"backend": "nixl", "timeouts": {"lease_s": 2.0, "drain_s": 1.0}, "return_turns": True}
PAGE, POOL = 16, 320
QUESTION, ANSWER = 17, 24
TURNS = 5


class Servers:
    """A prefill server and two decode servers; a context manager that ends their processes."""

    def __init__(self) -> None:
        self._rooms = iter(range(1, 1_000))
        self._dead: list[Process] = []
        self._port = 0
        self.all = [Process(mode, SETTINGS, {}) for mode in ("prefill", "decode", "decode")]

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.all:
            server.kill()

    @property
    def prefill(self) -> Process:
        """The prefill server."""
        return self.all[0]

    @property
    def decodes(self) -> list[Process]:
        """The decode servers."""
        return self.all[1:]

    def restart(self, **settings: Any) -> "Servers":
        """Create all servers anew, in their processes if they live."""
        self._port = free_port()
        self._rooms = iter(range(1, 1_000))
        for place in range(len(self.all)):
            self.start(place, **settings)
        return self

    def start(self, place: int, **settings: Any) -> None:
        """Create a server anew, in its process if it lives."""
        if self.all[place] in self._dead:
            self.all[place] = Process("decode" if place else "prefill", SETTINGS, {})
        text = json.dumps({"plain": True, **SETTINGS, **settings})
        self.all[place].tell("set_variable", name="KVFLOW_SGLANG", value=text)
        self.all[place].tell("converse", port=self._port)

    def kill(self, place: int) -> None:
        """Kill the process of a server."""
        self.all[place].kill()
        self._dead.append(self.all[place])

    def begin_turn(self, prompt: list[int], decode: int = 0, count: int = ANSWER) -> list[int]:
        """Let a decode server answer a prompt, check the text, and return it."""
        room, server = next(self._rooms), self.decodes[decode]
        self.prefill.tell("ask", what="serve", room=room, prompt=prompt)
        server.tell("ask", what="serve", room=room, prompt=prompt, max_tokens=count)
        assert until(lambda: ask(server, "result", room=room) is not None)
        text = ask(server, "result", room=room)
        assert text == ask(server, "text_after", prompt=prompt, count=count)
        return list(text)

    def settle(self) -> None:
        """Wait until no turn is on its way."""
        for server in reversed(self.all):
            assert until(partial(ask, server, "has_settled"))

    def take_turn(self, prompt: list[int], decode: int = 0, count: int = ANSWER) -> list[int]:
        """Take a turn, wait until it has gone back or not, and return the text."""
        text = self.begin_turn(prompt, decode, count)
        self.settle()
        return text

    def check_pools(self) -> None:
        """Check that no page, row or lock is left."""
        assert [ask(server, "num_free") for server in self.all] == [POOL] * len(self.all)
        assert ask(self.prefill, "num_protected") == 0
        assert all(ask(server, "has_free_rows") for server in self.decodes)
        assert all(ask(server, "is_idle") for server in self.all)

    def hang(self, prompt: list[int]) -> list[int]:
        """Take a turn whose pages do not arrive, and return the text."""
        first = self.take_turn(prompt)  # the second one needs no new connection
        prompt = [*prompt, *first, *question(1)]
        ask(self.decodes[0], "slow_down")
        text = self.begin_turn(prompt)
        assert until(lambda: not ask(self.prefill, "has_settled"))
        return [*prompt, *text]


def ask(server: Process, what: str, **arguments: Any) -> Any:
    return server.tell("ask", what=what, **arguments)


def until(condition: Callable[[], object], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def question(turn: int) -> list[int]:
    return [20 * turn + number + 1 for number in range(QUESTION)]


def whole(num_tokens: int) -> int:
    """Return the tokens in whole pages."""
    return num_tokens // PAGE * PAGE


@pytest.fixture(scope="module")
def processes() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.fixture
def servers(processes: Servers) -> Servers:
    return processes.restart()


def converse(servers: Servers, decodes: list[int]) -> tuple[list[int], list[int]]:
    """Take turns with these decode servers; return the tokens that each turn computed, and the bytes that moved."""
    computed, moved, prompt = [], [], list[int]()
    for turn, decode in enumerate(decodes):
        prompt += question(turn)
        prompt += servers.take_turn(prompt, decode)
        computed.append(ask(servers.prefill, "computed"))
        moved.append(ask(servers.prefill, "num_moved"))
    return computed, moved


def expected(*, returns: bool) -> tuple[list[int], list[int]]:
    """Return the tokens to be computed in each turn, and the pages moved up to each turn."""
    computed, pages, moved, cached, length = [], [], 0, 0, 0
    for _ in range(TURNS):
        length += QUESTION
        computed.append(length - cached)
        cached = whole(length)
        length += ANSWER
        if returns:
            moved += (whole(length - 1) - cached) // PAGE
            cached = whole(length - 1)
        pages.append(moved)
    return computed, pages


@pytest.mark.parametrize("decodes", [[0] * TURNS, [0, 1, 0, 0, 1]], ids=["one decode server", "two decode servers"])
def test_prefill_computes_only_what_is_new(servers: Servers, decodes: list[int]) -> None:
    """It gets only the pages that it lacks, whichever decode server had the turn before."""
    computed, moved = converse(servers, decodes)
    tokens, pages = expected(returns=True)
    assert computed == tokens
    assert moved == [PAGE_BYTES * count for count in pages]
    servers.check_pools()


def test_without_it_prefill_computes_every_answer_again(processes: Servers) -> None:
    servers, prompt, computed = processes.restart(return_turns=False), list[int](), []
    for turn in range(TURNS):
        prompt += question(turn)
        prompt += servers.take_turn(prompt)
        computed.append(ask(servers.prefill, "computed"))
    assert computed == expected(returns=False)[0]
    assert sum(computed) > 1.5 * sum(expected(returns=True)[0])
    servers.check_pools()


def test_prompt_of_less_than_a_page(servers: Servers) -> None:
    prompt = question(0)[:5]
    prompt += servers.take_turn(prompt)
    assert ask(servers.prefill, "num_cached", prompt=[*prompt, 1]) == whole(len(prompt) - 1)
    servers.check_pools()


def test_client_edits_history(servers: Servers) -> None:
    """Only what is before the edit is used."""
    prompt = question(0)
    prompt += servers.take_turn(prompt)
    prompt[20] = 999
    prompt += question(1)
    ask(servers.prefill, "computed")
    servers.take_turn(prompt)
    assert ask(servers.prefill, "computed") == len(prompt) - whole(20)
    servers.check_pools()


def test_same_turn_twice(servers: Servers) -> None:
    """What comes back a second time is there already."""
    prompt = question(0)
    assert servers.take_turn(prompt) == servers.take_turn(prompt)
    servers.check_pools()


def test_answer_without_a_new_page_does_not_go_back(servers: Servers) -> None:
    servers.take_turn(question(0), count=8)
    assert ask(servers.prefill, "num_moved") == 0
    servers.check_pools()


def test_prefill_is_short_of_pages(servers: Servers) -> None:
    """The turn is declined, and computed when it goes on."""
    ask(servers.prefill, "occupy", num_tokens=POOL - 5 * PAGE)
    prompt = question(0)
    prompt += servers.take_turn(prompt, count=60)
    assert ask(servers.prefill, "num_cached", prompt=prompt) == whole(QUESTION)
    servers.take_turn([*prompt[:40], 1], count=2)
    assert ask(servers.prefill, "num_free") == 5 * PAGE
    assert ask(servers.decodes[0], "num_free") == POOL


def test_decode_is_short_of_pages(servers: Servers) -> None:
    """It keeps no pages, so that running requests have them."""
    ask(servers.decodes[0], "occupy", num_tokens=POOL - 4 * PAGE)
    prompt = question(0)
    prompt += servers.take_turn(prompt)
    assert ask(servers.prefill, "num_moved") == 0
    assert ask(servers.decodes[0], "num_free") == 4 * PAGE


def test_decode_becomes_short_of_pages(servers: Servers) -> None:
    """Turns that prefill has not asked for are given up at once."""
    ask(servers.prefill, "ignore_offers")
    servers.begin_turn(question(0))
    assert not ask(servers.decodes[0], "has_settled")
    ask(servers.decodes[0], "occupy", num_tokens=POOL - 4 * PAGE)
    assert until(lambda: ask(servers.decodes[0], "has_settled"), timeout_s=3)
    servers.settle()
    assert ask(servers.decodes[0], "num_free") == 4 * PAGE


def test_prefill_does_not_look_at_offers(servers: Servers) -> None:
    """Decode keeps the pages for a few seconds."""
    ask(servers.prefill, "ignore_offers")
    servers.take_turn(question(0))
    servers.check_pools()


@pytest.mark.parametrize("part", ["digest", "answer", "ticket", "offer"])
def test_turn_that_is_not_what_it_says_or_cannot_be_offered(servers: Servers, part: str) -> None:
    """Nothing gets into the radix cache, and no request fails."""
    ask(servers.decodes[0], "forge", part=part)
    prompt = question(0)
    prompt += servers.take_turn(prompt)
    assert ask(servers.prefill, "num_cached", prompt=prompt) == whole(QUESTION)
    servers.check_pools()


def test_prefill_accepts_and_does_not_receive(processes: Servers) -> None:
    """Decode keeps the pages until the timeout for grants."""
    servers = processes.restart(timeouts={"grant_s": 1.0})
    ask(servers.prefill, "fail_to_receive")
    servers.take_turn(question(0))
    servers.check_pools()


def test_cache_is_flushed(servers: Servers) -> None:
    """SGLang does not flush while pages move. Turns are given up, and prompts are forgotten."""
    prompt = servers.hang(question(0))
    assert not any(ask(server, "is_idle") for server in (servers.prefill, servers.decodes[0]))
    assert ask(servers.prefill, "is_healthy_when_idle")
    assert not ask(servers.prefill, "flush")
    ask(servers.decodes[0], "speed_up")
    servers.settle()
    assert ask(servers.prefill, "num_cached", prompt=prompt) == whole(len(prompt) - ANSWER)
    assert ask(servers.prefill, "flush")
    assert ask(servers.decodes[0], "flush")
    servers.check_pools()
    assert ask(servers.prefill, "num_cached", prompt=prompt) == 0


def test_turn_that_waits_for_prefill_is_given_up_for_a_flush(servers: Servers) -> None:
    ask(servers.prefill, "ignore_offers")
    servers.begin_turn(question(0))
    assert not ask(servers.decodes[0], "has_settled")
    assert ask(servers.decodes[0], "flush")
    servers.check_pools()


def test_prompts_from_before_a_flush_are_forgotten(servers: Servers) -> None:
    servers.take_turn(question(0), count=2)
    assert ask(servers.prefill, "num_remembered") == QUESTION
    assert ask(servers.prefill, "flush")
    assert ask(servers.prefill, "num_remembered") == 0


def test_memory_is_released_and_used_again(servers: Servers) -> None:
    servers.take_turn(question(0))
    for server in servers.all:
        assert ask(server, "flush")
        ask(server, "release_memory")
    for server in servers.all:
        ask(server, "resume_memory")
    converse(servers, [0, 1])
    assert ask(servers.prefill, "num_moved") > 0
    servers.check_pools()


def test_decode_is_killed_while_pages_move(servers: Servers) -> None:
    """They come back once it is certain that nothing can write to them; another decode server goes on."""
    prompt = servers.hang(question(0))
    servers.kill(1)
    assert until(lambda: ask(servers.prefill, "has_settled"))
    assert ask(servers.prefill, "num_cached", prompt=prompt) == whole(len(prompt) - ANSWER)
    servers.start(1)
    servers.take_turn([*prompt, *question(2)])
    servers.check_pools()


def test_operator_releases_pages_without_a_proof(processes: Servers, tmp_path: Path) -> None:
    """The file is named after the turn."""
    servers = processes.restart(proofs={"process_end": False}, releases=str(tmp_path))
    servers.hang(question(0))
    servers.kill(1)
    assert until(lambda: ask(servers.prefill, "has_noticed_quarantine"))
    assert not ask(servers.prefill, "has_settled")
    (tmp_path / "turn-2").touch()
    assert until(lambda: ask(servers.prefill, "has_settled"))
    assert ask(servers.prefill, "num_free") == POOL


def test_prefill_is_killed_while_pages_move(servers: Servers) -> None:
    servers.hang(question(0))
    servers.kill(0)
    ask(servers.decodes[0], "speed_up")
    assert until(lambda: ask(servers.decodes[0], "has_settled"))
    assert ask(servers.decodes[0], "num_free") == POOL
    assert ask(servers.decodes[0], "has_free_rows")
