"""Posts whose end NIXL cannot report, and what proves that they have ended."""

import threading
from typing import Any

import anyio
import numpy as np
import pytest

from benchmarks.resources import num_files
from kvflow.backends.base import PostEnded
from kvflow.backends.nixl import NixlBackend
from kvflow.backends.nixl import endpoints as nixl_endpoints
from kvflow.backends.nixl.native import MAX_AGENTS
from kvflow.errors import BackendError
from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract.suite.processes import Target, target_process
from tests.backends.endpoints import (
    Endpoint,
    copies,
    descriptors_of,
    make_layout,
    open_backend,
    open_bare,
    open_endpoints,
    same,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CONNECT_ANEW = "the connection to the peer has failed; it must be connected anew"
NUM_BYTES = 128 * 2**20
PIECE = 2**14
POSTS = 8


class NativeError(Exception):
    """An error of NIXL that leaves the endpoint usable."""


def failing(error: Exception, *, first: int) -> Any:
    """Return a call that raises the first `first` times, then reports "DONE"."""
    calls = iter(range(first))

    def call(*_: object) -> str:
        if next(calls, None) is None:
            return "DONE"
        raise error

    return call


def writes(source: Endpoint, target: Target, part: int) -> Descriptors:
    """Return one of `POSTS` parts of the whole memory, in small pieces."""
    offsets = list(range(part * PIECE, NUM_BYTES, POSTS * PIECE))
    there = descriptors_of(source, offsets, PIECE)
    there[:, 0] = np.array(offsets, np.uint64) + np.uint64(target.address)
    return Descriptors(descriptors_of(source, offsets, PIECE), there)


def failed(source: Endpoint) -> list[PostEnded]:
    """Return the posts that have ended with an error."""
    return [end for end in source.ends() if end.error is not None]


async def write_until_it_is_killed(source: Endpoint, target: Target) -> None:
    """Post everything, and kill the target once the first post has ended."""
    await source.backend.connect(target.name, target.metadata)
    for part in range(POSTS):
        source.backend.post(part, target.name, writes(source, target, part), b"")
    await source.take_ends()
    target.process.kill()
    await source.take_ends(POSTS)
    if not failed(source):  # the write was faster than the signal
        source.backend.post(POSTS, target.name, writes(source, target, 0), b"")
        await source.take_ends(POSTS + 1)


@pytest.mark.parametrize("lanes", [pytest.param("", marks=pytest.mark.slow), "tcp"])
async def test_posts_to_a_peer_that_is_killed_end_but_their_bytes_may_linger(
    monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    async with target_process("nixl", NUM_BYTES) as target, open_backend(NixlBackend(), NUM_BYTES) as source:
        await write_until_it_is_killed(source, target)
        hit = [end for end in failed(source) if "Disconnect" in str(end.error)]
        assert hit
        assert all(end.lingers for end in hit)
        source.backend.post(99, target.name, writes(source, target, 0), b"")
        await source.take_until(lambda: source.ends()[-1].post_id == 99)
        assert source.ends()[-1] == PostEnded(99, CONNECT_ANEW, lingers=False)  # nothing was posted
        assert not source.doubts()
        await source.close()
        assert len({end.post_id for end in source.ends()}) == len(source.ends())


async def test_a_doubt_ends_when_the_endpoint_fails(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    errors = [NativeError(), api.nixlBind.nixlRemoteDisconnectError()]

    def transfer(*_: object) -> str:
        raise errors.pop(0)

    async with open_endpoints("nixl") as (source, target):
        monkeypatch.setattr(api.nixl_agent, "transfer", transfer)
        source.post(1, target, copies(source, target))
        await source.take_until(source.doubts)
        assert not source.ends()
        source.post(2, target, copies(source, target))
        await source.take_ends(2)
        assert {end.post_id: (end.error is None, end.lingers) for end in source.ends()} == dict.fromkeys(
            (1, 2), (False, True)
        )
        assert [doubt.post_id for doubt in source.doubts()] == [1]


async def test_a_post_over_a_failed_endpoint_ends_after_one_more_round_of_progress(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    happened: list[str] = []
    progress, release = api.nixl_agent.get_new_notifs, api.nixl_agent.release_xfer_handle

    def transfer(*_: object) -> str:
        happened.append("error")
        raise api.nixlBind.nixlRemoteDisconnectError

    def get_new_notifs(agent: object) -> Any:
        happened.append("progress")
        return progress(agent)

    def release_xfer_handle(agent: object, handle: object) -> None:
        happened.append("end")
        release(agent, handle)

    async with open_endpoints("nixl") as (source, target):
        monkeypatch.setattr(api.nixl_agent, "transfer", transfer)
        monkeypatch.setattr(api.nixl_agent, "get_new_notifs", get_new_notifs)
        monkeypatch.setattr(api.nixl_agent, "release_xfer_handle", release_xfer_handle)
        source.post(1, target, copies(source, target))
        await source.take_ends()
        between = happened[happened.index("error") + 1 : happened.index("end")]
        assert "progress" in between


async def test_a_later_post_over_the_same_endpoint_is_a_fence(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    async with open_endpoints("nixl") as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", failing(NativeError(), first=2))
            source.post(1, target, copies(source, target))
            await source.take_until(source.doubts)  # otherwise the next post may be joined with it
            source.post(2, target, copies(source, target))
            await source.take_until(lambda: len(source.doubts()) == 2)
        assert not source.ends()
        source.post(3, target, copies(source, target))
        await source.take_ends(3)
        assert {end.post_id: end.error is None for end in source.ends()} == {1: False, 2: False, 3: True}
        assert same(source, target, 0, 64)


async def test_a_post_that_began_before_the_doubt_is_no_fence(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    async with open_endpoints("nixl") as (source, target):
        handles: list[object] = []
        raised: list[object] = []
        may_end = threading.Event()

        def transfer(_: object, handle: object) -> str:
            handles.append(handle)
            return "PROC"

        def check(_: object, handle: object) -> str:
            if may_end.is_set() and handles.index(handle) == 1:
                raised.append(handle)
                raise NativeError
            return "DONE" if raised else "PROC"

        monkeypatch.setattr(api.nixl_agent, "transfer", transfer)
        monkeypatch.setattr(api.nixl_agent, "check_xfer_state", check)
        source.post(1, target, copies(source, target))
        await until(lambda: len(handles) == 1)  # otherwise the next post may be joined with it
        source.post(2, target, copies(source, target))
        await until(lambda: len(handles) == 2)
        may_end.set()
        await source.take_until(lambda: source.doubts() and source.ends())
        assert ([doubt.post_id for doubt in source.doubts()], [end.post_id for end in source.ends()]) == ([2], [1])
        await source.close()
        assert sorted(end.post_id for end in source.ends()) == [1, 2]


async def test_posts_of_several_threads_are_no_fences(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    options = {"plugin_options": {"num_threads": "1"}}
    async with open_endpoints("nixl", options=options) as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", failing(NativeError(), first=1))
            source.post(1, target, copies(source, target))
            await source.take_until(source.doubts)
            source.post(2, target, copies(source, target))
            await source.take_ends()
        assert [end.post_id for end in source.ends()] == [2]
        await source.close()
        assert sorted(end.post_id for end in source.ends()) == [1, 2]


async def test_a_peer_is_not_removed_while_it_is_in_doubt_whether_a_post_to_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    removed: list[object] = []
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    async with open_endpoints("nixl", count=3) as (source, target, other):
        monkeypatch.setattr(api.nixl_agent, "remove_remote_agent", lambda _, peer: removed.append(peer))
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", failing(NativeError(), first=1))
            source.post(1, target, copies(source, target))
            await source.take_until(source.doubts)
        await source.backend.disconnect(target.name)
        await source.backend.disconnect(other.name)
        await until(lambda: other.name in removed)  # which happens after the first
        assert removed == [other.name]
        assert not source.ends()
        await source.close()
        assert [end.post_id for end in source.ends()] == [1]


async def test_a_peer_whose_endpoint_has_failed_gets_a_new_one_when_it_is_connected_again(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    """The peer lives; only its endpoint has failed."""
    async with open_endpoints("nixl") as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", failing(api.nixlBind.nixlRemoteDisconnectError(), first=1))
            source.post(1, target, copies(source, target))
            await source.take_ends()
        await source.backend.disconnect(target.name)
        await source.connect(target)
        source.post(2, target, copies(source, target), b"again")
        await source.take_ends(2)
        await target.take_notices()
        assert {end.post_id: end.error is None for end in source.ends()} == {1: False, 2: True}
        assert same(source, target, 0, 64)


async def test_a_peer_is_not_connected_anew_while_the_library_is_broken(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    async with open_endpoints("nixl") as (source, target):
        monkeypatch.setattr(api.nixl_agent, "transfer", failing(api.nixlBind.nixlRemoteDisconnectError(), first=1))
        monkeypatch.setattr(api.nixl_agent, "get_new_notifs", failing(NativeError(), first=10**6))
        source.post(1, target, copies(source, target))
        await source.backend.disconnect(target.name)
        with pytest.raises(BackendError, match="have not ended"):
            await source.connect(target)


def recorded(monkeypatch: pytest.MonkeyPatch, agent_class: Any, method: str) -> list[object]:
    """Record the arguments of all later calls of a method of the agent."""
    arguments: list[object] = []
    call = getattr(agent_class, method)

    def record(agent: object, argument: object) -> object:
        arguments.append(argument)
        return call(agent, argument)

    monkeypatch.setattr(agent_class, method, record)
    return arguments


async def write_once(source: Endpoint, target: Endpoint, post_id: int) -> None:
    source.post(post_id, target, copies(source, target), b"here")
    await source.take_ends(post_id + 1)
    await target.take_notices(post_id + 1)


async def test_disconnecting_a_live_peer_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    """Removing the peer would leave the connection open on both sides, so kvflow keeps the endpoint and reuses it."""
    async with open_endpoints("nixl") as (source, target):
        added = recorded(monkeypatch, api.nixl_agent, "add_remote_agent")
        await write_once(source, target, 0)
        before = num_files()
        for post_id in range(1, 9):
            await source.backend.disconnect(target.name)
            await source.connect(target)
            await write_once(source, target, post_id)
        await until(lambda: num_files() <= before)
        assert {end.error for end in source.ends()} == {None}
        assert added == []


async def test_endpoints_to_disconnected_peers_are_bounded(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 2)
    removed = recorded(monkeypatch, api.nixl_agent, "remove_remote_agent")
    async with open_endpoints("nixl", count=5) as (source, *others):
        for other in others:
            await source.backend.disconnect(other.name)
        await until(lambda: len(removed) == 2)
        assert removed == [other.name for other in others[:2]]
        await source.connect(others[0])
        source.post(1, others[0], copies(source, others[0]))
        await source.take_ends()
        assert source.ends() == [PostEnded(1, None)]


async def test_memory_can_be_registered_while_the_endpoint_closes() -> None:
    """Whichever comes first wins; the other neither hangs nor crashes."""
    memory = np.zeros(64, np.uint8)
    async with NixlBackend() as backend:
        await open_bare(backend)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.register, make_layout(int(memory.ctypes.data), 64))
            tasks.start_soon(backend.aclose)


def test_who_runs_it_says_whether_writes_end_with_their_process() -> None:
    assert not NixlBackend().capabilities.ends_with_process
    assert NixlBackend(ends_with_process=True).capabilities.ends_with_process
    assert not NixlBackend.capabilities.ends_with_process


async def test_a_peer_that_is_connected_again_while_a_post_to_it_is_stuck_gets_a_fresh_endpoint(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    """After a partition TCP waits before it retransmits; later posts do not wait with it."""
    stuck: list[object] = []
    check = api.nixl_agent.check_xfer_state

    def stick(_: object, handle: object) -> str:
        stuck.append(handle)
        return "PROC"

    def check_others(agent: object, handle: object) -> Any:
        return "PROC" if handle in stuck else check(agent, handle)

    async with open_endpoints("nixl") as (source, target):
        monkeypatch.setattr(api.nixl_agent, "check_xfer_state", check_others)
        with monkeypatch.context() as patch:
            patch.setattr(api.nixl_agent, "transfer", stick)
            source.post(1, target, copies(source, target))
            await until(lambda: bool(stuck))
        await source.backend.disconnect(target.name)
        await source.connect(target)
        source.post(2, target, copies(source, target), b"again")
        await source.take_ends()
        await target.take_notices()
        assert source.ends() == [PostEnded(2, None)]
        assert same(source, target, 0, 64)
        monkeypatch.setattr(api.nixl_agent, "check_xfer_state", lambda _, __: "DONE")  # TCP has sent it
        await source.take_ends(2)
        assert source.ends()[1] == PostEnded(1, None)
        monkeypatch.setattr(api.nixl_agent, "check_xfer_state", check)
        source.post(3, target, copies(source, target))
        await source.take_ends(3)
        assert source.ends()[2] == PostEnded(3, None)


async def test_endpoints_whose_posts_are_stuck_are_bounded(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    monkeypatch.setattr(api.nixl_agent, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(api.nixl_agent, "check_xfer_state", lambda *_: "PROC")
    async with open_endpoints("nixl", options={"close_timeout_s": 0.0}) as (source, target):
        for post_id in range(MAX_AGENTS):
            source.post(post_id, target, copies(source, target))
            await source.backend.disconnect(target.name)
            if post_id + 1 < MAX_AGENTS:
                await source.connect(target)
        with pytest.raises(BackendError, match="previous endpoints"):
            await source.connect(target)
        await source.close()
        assert sorted(end.post_id for end in source.ends()) == list(range(MAX_AGENTS))
