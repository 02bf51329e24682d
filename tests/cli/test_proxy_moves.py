"""Streams that move from one decode server to another, and turns that go to prefill, in front of fake servers."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from kvflow.cli.proxy import application, conversations
from kvflow.cli.proxy.application import serve_proxy
from kvflow.cli.proxy.asked import Asked, BadAnswer, decode_fields
from kvflow.cli.proxy.conversations import Conversations, LastTurn
from kvflow.cli.proxy.moves import Moves, Running
from kvflow.cli.proxy.stream import MovableStream, is_movable
from tests.support.ports import unused_port

pytestmark = pytest.mark.anyio

PROMPT = [0, 1, 2]
COUNT = 12
BODY: Mapping[str, Any] = {"model": "m", "prompt": "x", "max_tokens": COUNT, "min_tokens": 5, "stream": True}


def text_of(token: int) -> str:
    """Return the text of a token: of every fourth one none, because its character ends with the next one."""
    return "" if token % 4 == 0 else f" {token - 1} {token}" if token % 4 == 1 else f" {token}"


def logprobs_of(prompt: Sequence[int], token: int, body: Mapping[str, Any]) -> dict[str, Any]:
    if not body.get("logprobs"):
        return {"logprobs": None}
    offset = sum(len(f" {it}") for it in range(len(prompt), token))
    return {"logprobs": {"tokens": [f" {token}"], "text_offset": [offset]}}


class FakeEngine:
    """A decode server whose tokens are their places in the text.

    Attributes:
        url: Its URL.
        computed: Parameters of prompts that it has computed.
        asked: Bodies of its requests.
        was_asked: Set with the first of them.
        orders: Requests that were told to move.
        may_answer: It answers to that once this is set.
        breaks_when_stopped: It closes the connection instead of sending the last token of a request that moves.
        on_end: Called when it has sent the last token of a request.
        steps: Tokens that it may still compute.
        has_stopped: Set when a request was told to move.
        stays: It moves nothing, and keeps no turns.
        status: Of its answers to requests that go on here.
        breaks_after: It closes the connection after that many tokens.
        fails: Its streams consist of an error.
        is_silent: It does not say whether it has stopped a request.
        withdrawn: Names of requests for which nobody will ask.
        was_withdrawn: Set with the first of them.
    """

    def __init__(self, number: int, steps: float) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.computed: list[dict[str, Any]] = []
        self.orders: list[str] = []
        self.may_answer = anyio.Event()
        self.may_answer.set()
        self.breaks_when_stopped = False
        self.on_end: Callable[[], None] = lambda: None
        self.steps = anyio.Semaphore(0)
        self.is_free = steps > 0
        self.has_stopped = anyio.Event()
        self.stays = self.fails = self.is_silent = False
        self.status = 200
        self.breaks_after = 10_000
        self.was_asked = anyio.Event()
        self.withdrawn: list[str] = []
        self.was_withdrawn = anyio.Event()
        self._number = number
        self._stopped: set[str] = set()
        self._limits: dict[str, int] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body["kv_transfer_params"]
        if "kvflow_withdrawn" in params:
            self.withdrawn.append(params["kvflow_withdrawn"])
            self.was_withdrawn.set()
        if "kvflow_kept" in params:
            return await self._find(params["kvflow_kept"])
        if "kvflow_moved" in params:
            return await self._stop(request, params["kvflow_moved"])
        if not body.get("stream"):
            self.computed.append(params)
            return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})
        self.asked.append(body)
        self.was_asked.set()
        if self.status != 200 and isinstance(body.get("prompt"), list):
            return web.json_response({"error": "no"}, status=self.status)
        return await self._stream(request, body)

    async def _find(self, name: str) -> web.StreamResponse:
        if self.is_silent:
            await anyio.sleep_forever()
        is_here = name in self._limits and not self.stays
        turn = {"do_remote_decode": True, "kvflow_ticket": {"turn": self._number}} if is_here else {}
        return web.json_response({"choices": [], "kv_transfer_params": turn})

    async def _stop(self, request: web.Request, name: str) -> web.StreamResponse:
        params: dict[str, Any] = {"do_remote_prefill": False}
        self.orders.append(name)
        if not self.stays:
            self._stopped.add(name)
            params = {"do_remote_prefill": True, "kvflow_ticket": {"from": self._number}}
            params["kvflow_max_tokens"] = self._limits[name]
        self.has_stopped.set()
        await self.may_answer.wait()
        if self.is_silent and request.transport is not None:
            request.transport.abort()
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fails:
            await response.write(b'data: {"error": {"message": "failed"}}\n\ndata: [DONE]\n\n')
            return response
        prompt: list[int] = body["prompt"] if isinstance(body.get("prompt"), list) else PROMPT
        assert text_of(prompt[-1]), "it would begin in the middle of a character"
        name, limit = body["kv_transfer_params"].get("transfer_id", ""), body.get("max_tokens", COUNT)
        self._limits[name] = limit
        is_chat, has_ids = request.path.endswith("/chat/completions"), body.get("return_token_ids")
        head = {"id": f"{request.headers['X-Request-Id']}-{self._number}", "created": self._number, "model": "m"}
        head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        prompt_ids = {"prompt_token_ids": prompt if has_ids else None}

        async def send(count: int, *choices: Mapping[str, Any], **more: Any) -> None:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            chunk = {**head, "choices": choices, "usage": usage, **more}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        if is_chat:
            await send(0, {"index": 0, "delta": {"role": "assistant", "content": ""}}, **prompt_ids)
        count = 0
        while count < limit and not (count and name in self._stopped):
            if not self.is_free:
                await self.steps.acquire()
            token, count = len(prompt) + count, count + 1
            is_last = count == limit or name in self._stopped
            if is_last and self.breaks_when_stopped and request.transport is not None:
                request.transport.abort()
            choice = {"finish_reason": "length" if is_last else None, "token_ids": [token] if has_ids else None}
            if is_chat:
                own: dict[str, Any] = {"logprobs": None, **({"stop_reason": None} if is_last else {})}
                await send(count, {"index": 0, "delta": {"content": text_of(token)}, **own, **choice})
            else:
                own = {**prompt_ids, **logprobs_of(prompt, token, body)}
                await send(count, {"index": 0, "text": text_of(token), "stop_reason": None, **choice, **own})
                prompt_ids = {"prompt_token_ids": None}
            if count == self.breaks_after and request.transport is not None:
                request.transport.abort()
        self.on_end()
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(count)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.status)


class Deployed:
    """A proxy, its prefill server and its decode servers, the first of which computes only what a test lets it."""

    def __init__(self, client: aiohttp.ClientSession, url: str, control: str, engines: Sequence[FakeEngine]) -> None:
        self.client = client
        self.url = url
        self._control = control
        self.prefill, *self.decode = engines

    async def drain(self, engine: FakeEngine, **query: str) -> tuple[int, dict[str, Any]]:
        async with self.client.post(f"{self._control}/drain", params={"server": engine.url, **query}) as answer:
            return answer.status, await answer.json()

    async def ask_metrics(self, line: str) -> None:
        """Wait until the proxy's metrics have a line."""
        while True:
            async with self.client.get(f"{self.url}/metrics") as answer:
                if f"kvflow_proxy_{line}" in (await answer.text()).splitlines():
                    return
            await anyio.sleep(0.01)

    async def until_drained(self, engine: FakeEngine) -> None:
        """Wait until a server gets no more requests: it is unhealthy, but its proxy is not."""
        engine.status = 503
        while True:
            async with self.client.get(f"{self.url}/health") as answer:
                if answer.status == 200:
                    break
            await anyio.sleep(0.01)
        engine.status = 200

    async def resume(self, engine: FakeEngine) -> None:
        async with self.client.post(f"{self._control}/resume", params={"server": engine.url}) as answer:
            assert answer.status == 200

    async def ask(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """Return the events of an answer."""
        headers = {"X-Request-Id": "mine"}
        async with self.client.post(self.url + path, json={**BODY, **fields}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            events = [it.removeprefix("data: ") for it in (await answer.text()).split("\n\n") if it]
        return [it if it == "[DONE]" else json.loads(it) for it in events]

    async def ask_and_drain(self, at: int, path: str = "/v1/completions", **fields: Any) -> tuple[list[Any], Any]:
        """Drain the first decode server when it has computed `at` tokens; return the events and what draining says."""
        first, found, drained = self.decode[0], list[Any](), list[Any]()

        async def ask() -> None:
            found.extend(await self.ask(path, **fields))
            first.is_free = True
            first.steps.release()

        async def drain() -> None:
            drained.append(await self.drain(first))

        async def until_stopped() -> None:
            await first.has_stopped.wait()
            for _ in range(COUNT):
                first.steps.release()

        for _ in range(at):
            first.steps.release()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await first.was_asked.wait()
                tasks.start_soon(drain)
                tasks.start_soon(until_stopped)
        return found, drained[0]


@asynccontextmanager
async def deployed(num_decode: int = 2) -> AsyncIterator[Deployed]:
    engines = [FakeEngine(number, steps=number != 1) for number in range(1 + num_decode)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            application = web.Application()
            application.router.add_post("/v1/completions", engine.answer)
            application.router.add_post("/v1/chat/completions", engine.answer)
            application.router.add_get("/health", engine.health)
            runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        urls, port = [engine.url for engine in engines], unused_port()
        url = await stack.enter_async_context(serve_proxy(urls[:1], urls[1:], "127.0.0.1", 0, port))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Deployed(client, url, f"http://127.0.0.1:{port}", engines)


async def undisturbed(path: str = "/v1/completions", **fields: Any) -> list[Any]:
    async with deployed(1) as one:
        one.decode[0].is_free = True
        return await one.ask(path, **fields)


ALL = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", ALL),
        ("/v1/completions", {**ALL, "return_token_ids": True, "logprobs": 1}),
        ("/v1/chat/completions", ALL),
        ("/v1/chat/completions", {**ALL, "return_token_ids": True}),
    ],
    ids=["text", "tokens", "chat", "chat with tokens"],
)
async def test_the_client_sees_nothing_of_a_move(at: int, path: str, fields: Any) -> None:
    """Also if the request stops at a token that ends in the middle of a character."""
    async with deployed() as made:
        events, drained = await made.ask_and_drain(at, path, **fields)
        (asked,) = made.decode[1].asked
    assert drained == (200, {"moved": 1, "stayed": 0, "recomputed": 0})
    assert events == await undisturbed(path, **fields)
    told = len(asked["prompt"]) - len(PROMPT)
    assert asked["prompt"] == list(range(len(asked["prompt"])))
    assert (asked["max_tokens"], asked["min_tokens"]) == (COUNT - told, max(0, 5 - told))
    params = asked["kv_transfer_params"]
    assert params["kvflow_ticket"] == {"from": 1}
    last = len(PROMPT) + at
    assert params["kvflow_rest"] == ([] if text_of(last) else [last])
    assert "messages" not in asked


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_moves_more_than_once(path: str) -> None:
    async with deployed() as made:
        events = list[Any]()
        made.decode[1].is_free = False

        async def ask() -> None:
            events.extend(await made.ask(path, **ALL))
            for engine in made.decode:
                engine.is_free = True

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                for number in range(4):
                    this, other = made.decode[number % 2], made.decode[(number + 1) % 2]
                    await this.was_asked.wait()
                    this.has_stopped, other.was_asked = anyio.Event(), anyio.Event()
                    this.steps.release()  # the request can move when it has a token
                    await made.resume(other)
                    tasks.start_soon(made.drain, this)
                    await this.has_stopped.wait()
                    this.steps.release()
                await other.was_asked.wait()
                for _ in range(COUNT):
                    other.steps.release()
    assert events == await undisturbed(path, **ALL)


async def test_the_client_gets_no_token_ids_that_it_has_not_asked_for() -> None:
    for event in await undisturbed():
        for choice in event["choices"] if isinstance(event, dict) else ():
            assert choice["token_ids"] is None
            assert choice["prompt_token_ids"] is None


async def test_a_drained_server_gets_no_requests_until_it_is_used_again() -> None:
    async with deployed() as made:
        first, second = made.decode
        assert await made.drain(first) == (200, {"moved": 0, "stayed": 0, "recomputed": 0})
        first.status = 503  # it may be stopped
        for _ in range(2):
            await made.ask()
        async with made.client.get(f"{made.url}/health") as answer:
            assert answer.status == 200
        assert (len(first.asked), len(second.asked)) == (0, 2)
        await made.drain(second)
        async with made.client.post(f"{made.url}/v1/completions", json=BODY) as answer:
            assert answer.status == 503
        first.status, first.is_free = 200, True
        await made.resume(first)
        await made.ask()
        assert len(first.asked) == 1


async def test_draining_ends_when_the_server_is_used_again() -> None:
    async with anyio.create_task_group() as tasks:
        moves = Moves(["a", "b"], never_reached, tasks, is_enabled=True)
        asked = Asked("p", "a", "/v1/completions", {}, {})
        with moves.counted(asked):

            async def drain() -> None:
                with pytest.raises(BadAnswer) as caught:
                    await moves.drain("a")
                assert caught.value.response.status == 409

            tasks.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            assert [moves.next_server() for _ in range(3)] == ["b"] * 3
            moves.resume("a")
            assert {moves.next_server() for _ in range(2)} == {"a", "b"}


def never_reached(*_: object) -> Any:
    raise AssertionError


async def test_what_stays_is_waited_for() -> None:
    async with deployed() as made:
        made.decode[0].stays = True
        events, drained = await made.ask_and_drain(3)
        assert not made.decode[1].asked
    assert drained == (200, {"moved": 0, "stayed": 1, "recomputed": 0})
    assert len(made.decode[0].orders) == 1
    assert events == await undisturbed()


async def test_requests_that_cannot_move_are_not_told_to() -> None:
    async with deployed() as made:
        first = made.decode[0]
        first.has_stopped.set()  # so that it goes on
        events, drained = await made.ask_and_drain(3, n=2)
        assert not made.decode[1].asked
    assert drained[1]["moved"] == 0
    assert "return_token_ids" not in first.asked[0]
    assert events[-1] == "[DONE]"


async def test_a_request_that_calls_a_tool_before_its_turn_comes() -> None:
    """It is not told to stop, so at its end it must not wait for an answer to that."""
    async with anyio.create_task_group() as tasks:
        moves = Moves(["a", "b"], never_reached, tasks, is_enabled=True)
        running = Running(Asked("p", "a", "/v1/chat/completions", {}, {}))
        deltas: list[dict[str, Any]] = [{"content": "x"}, {"tool_calls": []}]
        for delta in deltas:
            choice = {"delta": delta, "token_ids": [1], "finish_reason": None}
            running.stream.take_chunk({"prompt_token_ids": [0], "choices": [choice]})
        await moves._order(running)
        assert running.answered is None


@pytest.mark.parametrize("how", ["refuses", "fails", "breaks off"])
async def test_tokens_are_computed_again_if_the_next_server_fails(how: str) -> None:
    """By a third server, which knows all that the client has; the first one is told that nobody will ask."""
    async with deployed(3) as made:
        first, second, third = made.decode
        second.status = 503 if how == "refuses" else 200
        second.fails = how == "fails"
        second.breaks_after = 3 if how == "breaks off" else second.breaks_after
        events, drained = await made.ask_and_drain(5)
        (asked,) = third.asked
        if how == "refuses":
            with anyio.fail_after(20):
                await first.was_withdrawn.wait()
            assert first.withdrawn == [first.asked[0]["kv_transfer_params"]["transfer_id"]]
    assert "kvflow_ticket" not in asked["kv_transfer_params"]
    assert drained[1]["recomputed"] == 1 or how != "refuses"
    assert events == await undisturbed()


async def test_the_same_server_goes_on_if_no_other_does() -> None:
    async with deployed() as made:
        made.decode[1].status = 503
        events, _ = await made.ask_and_drain(5)
        assert len(made.decode[0].asked) == 2
        assert len(made.decode[0].orders) == 1
    assert events == await undisturbed()


async def test_a_text_that_may_have_been_cut_off_is_an_error() -> None:
    """The server has stopped the request, and its answer to that is lost: nobody knows how long the text may be."""
    async with deployed() as made:
        made.decode[0].is_silent = True
        events, _ = await made.ask_and_drain(5)
    assert "may have stopped a request early" in events[-2]["error"]["message"]


async def test_a_request_may_end_before_its_server_says_that_it_moves() -> None:
    async with deployed() as made:
        first = made.decode[0]
        first.may_answer = anyio.Event()
        first.on_end = first.may_answer.set
        events, drained = await made.ask_and_drain(5)
    assert drained[1]["moved"] == 1
    assert events == await undisturbed()


async def test_a_server_that_breaks_off_when_a_request_has_moved_away() -> None:
    """The ticket is of a token that nobody knows, so the next server does not get it."""
    async with deployed() as made:
        first, second = made.decode
        first.breaks_when_stopped = True
        events, drained = await made.ask_and_drain(5)
        with anyio.fail_after(20):
            await first.was_withdrawn.wait()
    assert drained[1] == {"moved": 0, "stayed": 0, "recomputed": 1}
    assert "kvflow_ticket" not in second.asked[0]["kv_transfer_params"]
    assert events == await undisturbed()


async def test_a_server_is_not_drained_before_the_next_one_has_begun() -> None:
    """It may have to send what it has computed."""
    async with deployed() as made:
        (first, second), drained = made.decode, list[Any]()
        second.is_free = False

        async def drain() -> None:
            drained.append(await made.drain(first))

        first.steps.release()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.ask)
                await first.was_asked.wait()
                tasks.start_soon(drain)
                await first.has_stopped.wait()
                first.steps.release()
                await made.ask_metrics("moved_total 1")
                await made.ask_metrics("moved_total 1")  # there is time for a wrong answer
                assert not drained
                second.is_free = True
                second.steps.release()
    assert drained


async def test_a_request_that_had_no_token_when_draining_began() -> None:
    async with deployed() as made:
        first, found = made.decode[0], list[Any]()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    found.extend(await made.ask())

                tasks.start_soon(ask)
                await first.was_asked.wait()
                tasks.start_soon(made.drain, first)
                await made.until_drained(first)
                first.steps.release()
                await first.has_stopped.wait()
                first.steps.release()
    assert found == await undisturbed()


def test_what_routers_and_servers_tell_each_other_is_not_for_clients() -> None:
    stream = MovableStream("/v1/completions", {})
    choice = {"text": "x", "token_ids": [1], "prompt_token_ids": [0], "finish_reason": None}
    (told,) = stream.take_chunk({"choices": [choice], "kv_transfer_params": {}})
    assert "kv_transfer_params" not in told
    details = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    (told,) = stream.take_chunk({"choices": [], "usage": dict(details)})
    assert "prompt_tokens_details" in told["usage"]
    stream.next_part()
    (told,) = stream.take_chunk({"choices": [], "usage": dict(details)})
    assert told["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def test_the_client_gets_the_token_ids_that_it_has_asked_for() -> None:
    first = (await undisturbed(return_token_ids=True))[0]["choices"][0]
    assert (first["prompt_token_ids"], first["token_ids"]) == (PROMPT, [3])


@pytest.mark.parametrize("how", ["fails", "breaks off"])
async def test_a_server_that_fails_alone_is_an_error_in_the_stream(how: str) -> None:
    async with deployed() as made:
        made.decode[0].is_free, made.decode[0].fails = True, how == "fails"
        made.decode[0].breaks_after = 3
        events = await made.ask()
    assert events[-2]["error"]["message"].startswith("failed" if how == "fails" else made.decode[0].url)


async def test_a_client_that_leaves_while_its_request_moves() -> None:
    async with deployed() as made:
        first, second = made.decode
        second.is_free = False
        for _ in range(3):
            first.steps.release()
        async with anyio.create_task_group() as tasks:
            async with made.client.post(f"{made.url}/v1/completions", json=BODY) as answer:
                await answer.content.readline()
                tasks.start_soon(made.drain, first)
                await first.has_stopped.wait()
            with anyio.fail_after(20):
                await first.was_withdrawn.wait()
            first.steps.release()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"stream": False}),
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/v1/completions", {"suffix": "x"}),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"logprobs": True}),
        ("/v1/chat/completions", {"include_reasoning": False}),
    ],
    ids=str,
)
def test_what_is_not_one_stream_of_text_does_not_move(path: str, fields: Mapping[str, Any]) -> None:
    assert not is_movable(path, decode_fields(json.dumps({**BODY, **fields}).encode()))


@pytest.mark.parametrize("fields", [{}, {"prompt": [1, 2]}, {"n": 1, "echo": False, "suffix": None}], ids=str)
def test_one_stream_of_text_may_move(fields: Mapping[str, Any]) -> None:
    assert is_movable("/v1/completions", decode_fields(json.dumps({**BODY, **fields}).encode()))
    assert is_movable("/v1/chat/completions", decode_fields(json.dumps({**BODY, **fields}).encode()))


async def test_control_has_two_calls() -> None:
    async with deployed() as made:
        control = vars(made)["_control"]
        async with made.client.post(f"{control}/else") as answer:
            assert answer.status == 404
        assert (await made.drain(made.prefill))[0] == 404


def chat(*said: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(said)]


async def say(made: Deployed, *said: Any, **fields: Any) -> str:
    """Have the next turn of a chat; return what is answered."""
    events = await made.ask("/v1/chat/completions", messages=chat(*said), **fields)
    return "".join(choice["delta"]["content"] for it in events[:-1] for choice in it["choices"])


@pytest.mark.parametrize("as_parts", [False, True])
async def test_prefill_gets_the_last_turn_of_a_chat(*, as_parts: bool) -> None:
    async with deployed(1) as made:
        made.decode[0].is_free = True
        first = await say(made, "one")
        content = [{"type": "text", "text": first}] if as_parts else first
        await say(made, "one", content, "two")
        await say(made, "one", content, "two")  # the turn has gone
    assert ["kvflow_ticket" in params for params in made.prefill.computed] == [False, True, False]
    assert made.prefill.computed[1]["kvflow_ticket"] == {"turn": 1}
    assert made.prefill.computed[1]["transfer_id"] == made.decode[0].asked[1]["kv_transfer_params"]["transfer_id"]


async def test_a_turn_is_where_the_request_has_moved_to() -> None:
    async with deployed() as made:
        events, _ = await made.ask_and_drain(3, "/v1/chat/completions", messages=chat("one"))
        first = "".join(choice["delta"]["content"] for it in events[:-1] for choice in it["choices"])
        await say(made, "one", first, "two")
    assert made.prefill.computed[1]["kvflow_ticket"] == {"turn": 2}


@pytest.mark.parametrize("how", ["other words", "another model", "not kept", "does not answer", "drained", "no stream"])
async def test_a_turn_that_is_not_passed_on(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "TURN_S", 0.05)
    async with deployed() as made:
        engine = made.decode[0]
        engine.is_free = True
        engine.stays, engine.is_silent = how == "not kept", how == "does not answer"
        first = await say(made, "one")
        if how == "drained":
            await made.drain(engine)
        said = ("one", first + "!" if how == "other words" else first, "two")
        model = "other" if how == "another model" else "m"
        if how == "no stream":
            body = {**BODY, "messages": chat(*said), "stream": False}
            async with made.client.post(f"{made.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
        else:
            await say(made, *said, model=model)
    assert len(made.prefill.computed) == 2
    assert not any("kvflow_ticket" in params for params in made.prefill.computed)


def test_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST", 2)
    kept = Conversations()
    fields = [decode_fields(json.dumps({"messages": chat(str(number))}).encode()) for number in range(3)]
    for each in fields:
        kept.keep_turn(each, "x", LastTurn("a", "T"))
    following = [decode_fields(json.dumps({"messages": chat(str(number), "x", "y")}).encode()) for number in range(3)]
    assert [kept.take_turn(each) is not None for each in following] == [False, True, True]


@pytest.mark.parametrize("messages", [None, "x", [1], [{"content": 1}], []])
def test_what_is_no_chat_is_no_conversation(messages: object) -> None:
    fields = decode_fields(json.dumps({"messages": messages}).encode())
    kept = Conversations()
    kept.keep_turn(fields, "x", LastTurn("a", "T"))
    assert kept.take_turn(fields) is None
