"""Behaviour of NIXL alone: installation, failures, polling, and leaks."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from benchmarks.resources import num_files
from kvflow.backends import create_backend
from kvflow.backends.base import PostEnded
from kvflow.backends.nixl import NixlBackend, library
from kvflow.errors import BackendError, BackendUnavailable, ConfigError, RegistrationError
from tests.backends.endpoints import (
    Endpoint,
    copies,
    fresh_name,
    make_layout,
    open_backend,
    open_bare,
    open_endpoints,
    same,
)
from tests.backends.recording import record_waits
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

MODULES = ("nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api")
STUCK = 5.0
"""Seconds after which a test counts as hung."""


class NativeError(Exception):
    """A fake of NIXL's own errors, which have no common base class."""


@pytest.fixture
def agent_class() -> Any:
    """Return the agent class of NIXL that kvflow imports."""
    return importlib.import_module("nixl_cu12._api").nixl_agent


def raising(*_: object) -> Any:
    raise NativeError("NIXL_ERR_BACKEND")


def has_thread(agent_name: str) -> bool:
    return any(thread.name.endswith(f"-{agent_name}") for thread in threading.enumerate())


async def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    name = fresh_name()
    async with NixlBackend() as backend:
        with pytest.raises(BackendUnavailable) as caught:
            await open_bare(backend, name)
        assert "kvflow[nixl-cu12]" in str(caught.value)
        assert "kvflow[nixl-cu13]" in str(caught.value)
        assert set(caught.value.values) == {"nixl_cu12", "nixl_cu13"}
        assert not has_thread(name)
        with pytest.raises(BackendError):
            await backend.register(make_layout(4096, 1))


async def test_the_second_build_is_taken_if_the_first_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", importlib.import_module("nixl_cu12"))
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", importlib.import_module("nixl_cu12._api"))
    for module in MODULES[:2]:
        monkeypatch.setitem(sys.modules, module, None)
    async with open_backend(NixlBackend()) as endpoint:
        assert endpoint.backend.metadata()


def test_a_plugin_whose_notices_may_overtake_bytes_is_refused() -> None:
    """Whoever knows better says so; UCX is known."""
    with pytest.raises(ConfigError, match="notices_follow_bytes") as caught:
        create_backend("nixl", {"plugin": "LIBFABRIC"})
    assert caught.value.values["plugin"] == "LIBFABRIC"
    assert create_backend("nixl", {"plugin": "LIBFABRIC", "notices_follow_bytes": True}).name == "nixl"
    assert create_backend("nixl", {"plugin": "UCX"}).name == "nixl"


async def test_an_unknown_plugin_is_named() -> None:
    backend, name = NixlBackend(plugin="PIGEON", notices_follow_bytes=True, plugin_options={"loft": "3"}), fresh_name()
    with pytest.raises(BackendUnavailable) as caught:
        await open_bare(backend, name)
    assert (caught.value.values["plugin"], caught.value.values["options"]) == ("PIGEON", {"loft": "3"})
    assert not has_thread(name)
    await backend.aclose()


async def test_opening_can_be_cancelled() -> None:
    name = fresh_name()
    async with NixlBackend() as backend:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await open_bare(backend, name)
        with pytest.raises(BackendError):
            await backend.register(make_layout(4096, 1))
    assert not has_thread(name)


@pytest.mark.parametrize("refuse", [raising, lambda *_: None], ids=["raises", "gives None"])
async def test_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch, agent_class: Any, refuse: Any) -> None:
    monkeypatch.setattr(agent_class, "register_memory", refuse)
    async with NixlBackend() as backend:
        await open_bare(backend)
        with pytest.raises(RegistrationError):
            await backend.register(make_layout(4096, 64))
        with pytest.raises(BackendError):
            backend.metadata()


async def test_an_agent_is_polled_sharply_only_while_something_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = record_waits(monkeypatch)
    idle_s, busy_s = 3600.0, 1e-4
    async with open_backend(
        NixlBackend(idle_interval_s=idle_s, busy_interval_s=busy_s, quiet_interval_s=busy_s)
    ) as endpoint:
        assert busy_s not in waits
        await until(lambda: waits[-1] == idle_s)
        endpoint.backend.watch(active=True)
        await until(lambda: waits.count(busy_s) > 20)
        endpoint.backend.watch(active=False)
        await until(lambda: waits[-1] == idle_s)


async def test_the_sender_is_busy_until_its_posts_have_ended(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    waits, states = record_waits(monkeypatch), ["PROC"]
    monkeypatch.setattr(agent_class, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(agent_class, "check_xfer_state", lambda *_: states[0])
    options = {"idle_interval_s": 3600.0, "busy_interval_s": 1e-4, "quiet_interval_s": 1e-4}
    async with open_endpoints("nixl", count=1, options=options) as (source,), open_backend(NixlBackend()) as target:
        await source.connect(target)
        source.post(1, target, copies(source, target))
        await until(lambda: waits.count(1e-4) > 20)
        states[0] = "DONE"
        await source.take_ends()
        await until(lambda: waits[-1] != 1e-4)
        assert source.events == [PostEnded(1, None)]


async def test_closing_gives_up_on_posts_that_do_not_end(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    monkeypatch.setattr(agent_class, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(agent_class, "check_xfer_state", lambda *_: "PROC")
    async with open_endpoints("nixl", options={"close_timeout_s": 0.02}) as (source, target):
        for post_id in range(5):
            source.post(post_id, target, copies(source, target), b"never")
        await source.backend.disconnect(target.name)
        await source.close()
        assert sorted(end.post_id for end in source.ends()) == list(range(5))
        assert None not in {end.error for end in source.ends()}


async def test_a_running_post_is_never_released(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    """A released transfer would go on unseen; only destroying the agent stops it."""
    monkeypatch.setattr(agent_class, "transfer", lambda *_: "PROC")
    monkeypatch.setattr(agent_class, "check_xfer_state", lambda *_: "PROC")
    released: list[object] = []
    monkeypatch.setattr(agent_class, "release_xfer_handle", lambda _, handle: released.append(handle))
    async with open_endpoints("nixl", options={"close_timeout_s": 0.02}) as (source, target):
        source.post(1, target, copies(source, target))
        await source.backend.disconnect(target.name)
        await source.close()
        assert [end.lingers for end in source.ends()] == [True]
    assert released == []


async def test_a_post_that_blocks_holds_up_only_its_own_thread(
    monkeypatch: pytest.MonkeyPatch, agent_class: Any
) -> None:
    """A post blocks when NIXL copies everything inline."""
    transfer, may_go_on = agent_class.transfer, threading.Event()

    def block(*arguments: object) -> object:
        assert may_go_on.wait(STUCK)
        return transfer(*arguments)

    monkeypatch.setattr(agent_class, "transfer", block)
    async with open_endpoints("nixl") as (source, target):
        source.post(1, target, copies(source, target))
        for _ in range(3):  # the loop goes on, as with other backends
            source.backend.watch(active=True)
            await anyio.lowlevel.checkpoint()
        may_go_on.set()
        await source.take_ends()
        assert source.events == [PostEnded(1, None)]


async def test_the_library_gets_no_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's progress thread would keep a whole core busy."""
    api, wishes = importlib.import_module("nixl_cu12._api"), list[bool]()
    config = api.nixl_agent_config

    def record(*, enable_prog_thread: bool, **others: object) -> object:
        wishes.append(enable_prog_thread)
        return config(enable_prog_thread=enable_prog_thread, **others)

    monkeypatch.setattr(api, "nixl_agent_config", record)
    async with open_backend(NixlBackend()):
        assert wishes == [False]


@pytest.mark.parametrize(
    ("method", "in_doubt"),
    [
        ("get_xfer_descs", False),
        ("initialize_xfer", False),
        ("transfer", True),
        ("check_xfer_state", True),
    ],
)
async def test_a_post_that_fails(
    monkeypatch: pytest.MonkeyPatch, agent_class: Any, method: str, in_doubt: bool
) -> None:
    """A post that fails to start has ended; one that fails later is in doubt until the endpoint closes."""
    async with open_endpoints("nixl") as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(agent_class, "transfer", lambda *_: "PROC")
            patch.setattr(agent_class, method, raising)
            source.post(1, target, copies(source, target), b"notice")
            await source.take_until(lambda: source.events)
        assert [doubt.post_id for doubt in source.doubts()] == [1] * in_doubt
        assert bool(source.ends()) != in_doubt
        source.post(2, target, copies(source, target))
        await source.take_until(lambda: any(end.post_id == 2 for end in source.ends()))
        assert same(source, target, 0, 64)
        await source.close()
        (end,) = [end for end in source.ends() if end.post_id == 1]
        assert "NIXL_ERR_BACKEND" in str(end.error) or in_doubt


async def close_soon(endpoint: Endpoint) -> None:
    with anyio.fail_after(STUCK):
        await endpoint.close()


async def test_an_agent_that_breaks_while_it_is_polled(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    async with open_endpoints("nixl") as (source, target):
        monkeypatch.setattr(agent_class, "get_new_notifs", raising)
        source.backend.watch(active=True)
        for _ in range(2):
            with pytest.raises(BackendError, match="transport library has failed"):
                await source.take_until(lambda: False)
        await close_soon(source)
        assert not has_thread(source.name)
        await target.close()
    assert not has_thread(target.name)


async def test_an_agent_that_breaks_with_posts_in_flight_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, agent_class: Any
) -> None:
    async with open_endpoints("nixl", options={"close_timeout_s": 0.02}) as (source, target):
        monkeypatch.setattr(agent_class, "transfer", lambda *_: "PROC")
        monkeypatch.setattr(agent_class, "check_xfer_state", lambda *_: "PROC")
        monkeypatch.setattr(agent_class, "get_new_notifs", raising)
        source.post(1, target, copies(source, target))
        with pytest.raises(BackendError, match="transport library has failed"):
            await source.take_until(lambda: False)
        await close_soon(source)
        assert [end.post_id for end in source.ends()] == [1]
        assert not has_thread(source.name)


@pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("method", ["release_xfer_handle", "remove_remote_agent", "deregister_memory"])
async def test_a_clean_up_that_fails_does_not_stop_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, agent_class: Any, method: str
) -> None:
    """The post still ends, and the endpoint can be closed."""
    async with open_endpoints("nixl") as (source, target):
        with monkeypatch.context() as patch:
            patch.setattr(agent_class, method, raising)
            source.post(1, target, copies(source, target))
            await source.backend.disconnect(target.name)
            await close_soon(source)
        assert [end.post_id for end in source.ends()] == [1]
        assert not has_thread(source.name)


async def open_and_close() -> None:
    async with open_endpoints("nixl") as (source, target):
        source.post(1, target, copies(source, target), b"x")
        await source.take_ends()
        await target.take_notices()


def held() -> tuple[set[str], int]:
    """Return the names of Python threads, and the number of open files."""
    gc.collect()
    return {thread.name for thread in threading.enumerate()}, num_files()


def is_given_back(before: tuple[set[str], int]) -> bool:
    """Return whether no more is held than before; threads of an earlier test may end meanwhile."""
    now = held()
    return now[0] <= before[0] and now[1] <= before[1]


async def test_nothing_is_left_after_close() -> None:
    for _ in range(3):
        await open_and_close()
    before = held()
    for _ in range(5):
        await open_and_close()
    await until(lambda: is_given_back(before))


async def test_closing_is_not_cut_short_by_cancellation() -> None:
    await open_and_close()
    before = held()
    async with open_endpoints("nixl") as (source, target):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await source.backend.aclose()
        assert scope.cancelled_caught is False
        await target.close()
        await until(lambda: is_given_back(before))


async def connect_in_vain(source: Endpoint, target: Endpoint) -> None:
    with pytest.raises(BackendError):
        await source.backend.connect("unknown", target.backend.metadata())


async def test_what_has_ended_is_told_before_what_takes_long(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    """A write that ends within its post is reported before the owner thread runs its next command."""
    begins, goes_on = threading.Event(), threading.Event()
    async with open_endpoints("nixl") as (source, target):
        source.post(1, target, copies(source, target))
        await source.take_ends()
        with monkeypatch.context() as patch:
            patch.setattr(agent_class, "add_remote_agent", lambda *_: goes_on.wait(2 * STUCK) and raising())
            patch.setattr(agent_class, "transfer", lambda *_: "DONE")
            backend: Any = source.backend
            backend._owner.submit(lambda: begins.wait(STUCK))
            source.post(2, target, copies(source, target))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connect_in_vain, source, target)
                await anyio.wait_all_tasks_blocked()  # the thread finds its next command right after the post
                begins.set()
                with anyio.move_on_after(STUCK):
                    await source.take_ends(2)
                is_told = len(source.ends()) == 2
                goes_on.set()
        assert is_told
        assert [end.post_id for end in source.ends()] == [1, 2]


async def test_what_has_ended_is_told_before_a_breakdown(monkeypatch: pytest.MonkeyPatch, agent_class: Any) -> None:
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(STUCK)

    async with open_endpoints("nixl") as (source, target):
        backend: Any = source.backend
        backend._owner.submit(hold)
        await anyio.to_thread.run_sync(is_held.wait)  # so that it fetches notices after the post, not before
        monkeypatch.setattr(agent_class, "transfer", lambda *_: "PROC")
        monkeypatch.setattr(agent_class, "check_xfer_state", lambda *_: "DONE")
        monkeypatch.setattr(agent_class, "get_new_notifs", raising)
        source.post(1, target, copies(source, target))
        goes_on.set()
        with pytest.raises(BackendError, match="transport library has failed"):
            await source.take_until(lambda: False)
        assert [end.post_id for end in source.ends()] == [1]
        await close_soon(source)


HANG_UP = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"

PROGRAM = """
import signal
import anyio
import anyio.to_thread
from tests.backends.endpoints import copies, open_endpoints

async def main():
    async with open_endpoints("nixl") as (source, target):
        source.post(1, target, copies(source, target), b"x")
        await source.take_ends()
        await target.take_notices()
        {end}

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who started the tests may ignore it
anyio.run(main)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), (HANG_UP, -signal.SIGHUP)],
    ids=str,
)
async def test_a_process_that_used_nixl_ends_as_it_wants_and_prints_nothing(end: str, code: int) -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    ended = await anyio.run_process(command, cwd=root, env=environment, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")


async def test_the_environment_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_TEST_SET", "mine")
    monkeypatch.delenv("KVFLOW_TEST_UNSET", raising=False)
    backend = create_backend("nixl", {"environment": {"KVFLOW_TEST_SET": "x", "KVFLOW_TEST_UNSET": "y"}})
    async with open_backend(backend):
        assert (os.environ["KVFLOW_TEST_SET"], os.environ.pop("KVFLOW_TEST_UNSET")) == ("mine", "y")


def test_efa_is_kept_from_the_process_only_where_there_is_none(tmp_path: Path) -> None:
    driver = tmp_path / "efa"
    assert library.default_environment(driver)["UCX_MODULES"] == "^efa"
    driver.mkdir()
    (driver / "module").touch()
    (driver / "new_id").touch()
    assert library.default_environment(driver)["UCX_MODULES"] == "^efa"
    (driver / "0000:00:1e.0").touch()
    assert "UCX_MODULES" not in library.default_environment(driver)
    assert library.default_environment(driver)["NIXL_LOG_LEVEL"] == "FATAL"


async def test_efa_is_left_to_the_process_where_the_host_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "0000:00:1e.0").touch()
    monkeypatch.setattr(library.default_environment, "__defaults__", (tmp_path,))
    for variable in ("UCX_MODULES", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    async with open_backend(NixlBackend()):
        assert "UCX_MODULES" not in os.environ
        assert os.environ["NIXL_LOG_LEVEL"] == "FATAL"
