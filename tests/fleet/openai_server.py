"""An HTTP server around one rank, which plays a vLLM server to routers: `python -m tests.fleet.openai_server OPTIONS`.

It speaks vLLM's `nixl` dialect. Prefill fills pages from the number in the prompt, keeps them, and answers with a
ticket. Decode receives the pages, and its answer is a digest of what has arrived. A refusal has the status 503 and a
type. On SIGTERM it finishes what it has, closes its rank, and prints how many pages are in quarantine.
"""

import hashlib
import re
import signal
import sys
from typing import Any, Final, Generic, TypeVar
from uuid import uuid4

import anyio
import anyio.abc
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

import kvflow
from kvflow.engines.vllm.dialect import is_for_decode, reply, take_reference
from tests.hosts.pool import NUM_TOKENS, LanePool
from tests.hosts.worker import layout_of, reason_of

__all__ = ["CLOSED", "MODEL", "ServerOptions", "State", "prompt_of", "text_of"]

MODEL: Final = "numbers"
CLOSED: Final = "closed with pages in quarantine:"
COMPUTE_S: Final = 0.05
ANNOUNCE_S: Final = 1.0
NUMBER: Final = re.compile(r"number (\d+)")
TIMEOUTS: Final = kvflow.Timeouts(lease_s=1.0, grant_s=5.0, open_s=5.0, handshake_s=5.0)

AnyRank = TypeVar("AnyRank", kvflow.PrefillRank, kvflow.DecodeRank)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the process.

    Attributes:
        role: "prefill" or "decode".
        instance: Name of the rank.
        port: Port of the HTTP server.
        admin: Directory for the rank's socket.
        num_lanes: Requests that fit into its pool.
        announce: Where it announces itself while it is ready, "host:port"; None for nowhere.
        host: Address of everything.
        control_port: Port of the rank, if it is for prefill; 0 for a free one.
        registry: As in `kvflow.RankConfig`.
        keys: Directory with its keys; None for none.
    """

    role: str
    instance: str
    port: int
    admin: str | bool = True
    num_lanes: int = 32
    announce: str | None = None
    host: str = "127.0.0.1"
    control_port: int = 0
    registry: str | None = None
    keys: str | None = None


class State(msgspec.Struct, frozen=True):
    """What `GET /state` answers: requests that came, requests that were answered, and requests that have pages."""

    asked: int
    answered: int
    held: int


def prompt_of(number: int) -> str:
    """Return a prompt."""
    return f"number {number}"


def text_of(number: int) -> str:
    """Return the right answer to it."""
    pool = LanePool(1)
    pool.fill(0, number)
    return digest_of(pool, 0)


def digest_of(pool: LanePool, lane: int) -> str:
    return hashlib.sha256(pool.memory[:, pool.pages(lane)].tobytes()).hexdigest()[:16]


class OpenAIServer(Generic[AnyRank]):
    """What both roles have. `complete` answers a request for a completion."""

    def __init__(self, rank: AnyRank, pool: LanePool, tasks: anyio.abc.TaskGroup) -> None:
        self._rank: AnyRank = rank
        self._pool = pool
        self._tasks = tasks
        self._asked = self._answered = 0
        self._put_free, self._take_free = anyio.create_memory_object_stream[int](pool.num_lanes)
        for lane in range(pool.num_lanes):
            self._put_free.send_nowait(lane)

    def routes(self) -> list[web.RouteDef]:
        """Return what routers ask, and what tests ask."""
        return [
            web.get("/health", self._answer_health),
            web.get("/v1/models", self._answer_models),
            web.get("/version", self._answer_version),
            web.get("/state", self._answer_state),
            web.post("/v1/completions", self._answer_completion),
        ]

    def _free(self, lane: int) -> None:
        self._pool.clear(lane)
        self._put_free.send_nowait(lane)

    async def complete(self, number: int, params: dict[str, Any]) -> dict[str, Any]:
        """Return the text and, from prefill, the parameters; raise KvflowError if that fails."""
        raise NotImplementedError

    async def _answer_health(self, _: web.Request) -> web.Response:
        """Answer as `kvflow.engines.vllm.health` does."""
        return web.Response(status=200 if self._rank.health().ready else 503)

    async def _answer_models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": 2_048}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _answer_state(self, _: web.Request) -> web.Response:
        held = self._pool.num_lanes - self._take_free.statistics().current_buffer_used
        return web.Response(body=msgspec.json.encode(State(self._asked, self._answered, held)))

    async def _answer_completion(self, request: web.Request) -> web.Response:
        self._asked += 1
        body = await request.json()
        found = NUMBER.fullmatch(body["prompt"])
        assert found is not None
        try:
            answer = await self.complete(int(found[1]), body.get("kv_transfer_params") or {})
        except kvflow.KvflowError as error:
            refusal = {"message": str(error), "type": reason_of(error), "code": 503}
            return web.json_response({"error": refusal}, status=503)
        self._answered += 1
        choice = {"index": 0, "text": answer.pop("text"), "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": NUM_TOKENS, "completion_tokens": 1, "total_tokens": NUM_TOKENS + 1}
        head = {"id": "cmpl", "object": "text_completion", "created": 1, "model": MODEL}
        return web.json_response({**head, "choices": [choice], "usage": usage, **answer})


class PrefillServer(OpenAIServer[kvflow.PrefillRank]):
    """Keeps the pages of a request until decode has them."""

    async def complete(self, number: int, params: dict[str, Any]) -> dict[str, Any]:
        if not is_for_decode(params):
            raise kvflow.LocalProtocolError("the router did not ask for a cache", params=params)
        room = uuid4().hex
        await self._tasks.start(self._send, room, number)
        ticket = self._rank.ticket("any")
        return {
            "text": "",
            "kv_transfer_params": reply(
                ticket, room, request_id=room, num_tokens=NUM_TOKENS, prompt="", trust=self._rank.config.trust
            ),
        }

    async def _send(self, room: str, number: int, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        lane = await self._take_free.receive()
        self._pool.fill(lane, number)
        sender = self._rank.send(room)
        has_begun = False
        try:
            async with sender:
                has_begun = True
                await anyio.sleep(COMPUTE_S)
                task_status.started()
                await sender.finish((0, NUM_TOKENS), {"kv": self._pool.pages(lane)})
        except kvflow.KvflowError:
            if not has_begun:
                self._free(lane)
                raise
        await sender.until_safe()
        self._free(lane)


class DecodeServer(OpenAIServer[kvflow.DecodeRank]):
    """Receives a request, and answers with a digest of its pages."""

    async def complete(self, number: int, params: dict[str, Any]) -> dict[str, Any]:
        reference = take_reference(params)
        if reference is None:
            raise kvflow.LocalProtocolError("the router passed no ticket", params=params)
        lane = await self._take_free.receive()
        receiver = None
        try:
            pages = {"kv": self._pool.pages(lane)}
            async with self._rank.receive(prefill=reference.prefill, tokens=(0, NUM_TOKENS), pages=pages) as receiver:
                await receiver.done()
                return {"text": digest_of(self._pool, lane)}
        finally:
            self._tasks.start_soon(self._free_when_safe, receiver, lane)

    async def _free_when_safe(self, receiver: kvflow.RoomReceiver | None, lane: int) -> None:
        if receiver is not None:
            await receiver.until_safe()
        self._free(lane)


async def announce(options: ServerOptions, rank: kvflow.PrefillRank | kvflow.DecodeRank) -> None:
    """Announce the server to vLLM's router every second, as vLLM's own connectors do, as long as its rank is ready."""
    kind, http = options.role[0].upper(), f"{options.host}:{options.port}"
    message = msgspec.msgpack.encode({"type": kind, "http_address": http, "zmq_address": http})
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{options.announce}")
        while True:
            if rank.health().ready:
                await dealer.send(message)
            await anyio.sleep(ANNOUNCE_S)


async def main(options: ServerOptions) -> None:
    """Serve until SIGTERM."""
    pool = LanePool(options.num_lanes)
    common: dict[str, Any] = {
        "instance": options.instance,
        "backend": "nixl",
        "trust": kvflow.Trust.none() if options.keys is None else kvflow.load_trust(options.keys),
        "admin": options.admin,
        "timeouts": TIMEOUTS,
        "registry": options.registry,
    }
    rank: kvflow.PrefillRank | kvflow.DecodeRank
    if options.role == "prefill":
        bind = f"tcp://{options.host}:{options.control_port}"
        rank = kvflow.PrefillRank(kvflow.PrefillConfig(bind=bind, **common), layout_of(pool))
    else:
        rank = kvflow.DecodeRank(kvflow.DecodeConfig(advertise=options.host, **common), layout_of(pool))
    async with rank, anyio.create_task_group() as tasks:
        server = make_server(rank, pool, tasks)
        application = web.Application()
        application.add_routes(server.routes())
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port).start()
        if options.announce is not None:
            tasks.start_soon(announce, options, rank)
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                break
        await rank.drain()
        await runner.cleanup()
        sys.stdout.write(f"{CLOSED} {len(rank.quarantined())}\n")
        tasks.cancel_scope.cancel()


def make_server(
    rank: kvflow.PrefillRank | kvflow.DecodeRank, pool: LanePool, tasks: anyio.abc.TaskGroup
) -> PrefillServer | DecodeServer:
    """Return the server of a rank."""
    if isinstance(rank, kvflow.PrefillRank):
        return PrefillServer(rank, pool, tasks)
    return DecodeServer(rank, pool, tasks)


if __name__ == "__main__":
    anyio.run(main, msgspec.json.decode(sys.argv[1], type=ServerOptions))
