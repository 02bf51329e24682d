"""The thread that owns a native agent."""

import concurrent.futures
import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvflow.backends.owner_thread import COMMANDS_PER_ROUND, GAPS, OwnerThread, PollIntervals
from kvflow.errors import BackendError
from tests.backends.recording import Clock, record_waits
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BUSY_S = 1e-4
QUIET_S = 5e-3
IDLE_S = 3600.0


class Agent:
    """Counts its polls, and reports what the test sets."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self.busy = True
        self.eventful = True
        self.error: Exception | None = None

    @property
    def num_polls(self) -> int:
        return self.log.count("poll")

    def poll(self) -> bool:
        self.log.append("poll")
        if self.error is not None:
            raise self.error
        return self.eventful

    def is_busy(self) -> bool:
        return self.busy

    def may_sleep(self) -> bool:
        return False


class Owner(OwnerThread):
    """An owner thread that records its crashes."""

    def __init__(self, idle_interval_s: float = IDLE_S) -> None:
        self.crashes: list[Exception] = []
        super().__init__("test-owner", self.crashes.append, PollIntervals(BUSY_S, QUIET_S, idle_interval_s))

    async def poll_agent(self, agent: Agent | None) -> None:
        await self.call(functools.partial(self.adopt, agent))

    async def rounds(self, count: int = 3) -> None:
        """Wait until the thread has run `count` commands."""
        for _ in range(count):
            await self.call(lambda: None)


@asynccontextmanager
async def owner_thread() -> AsyncIterator[Owner]:
    owner = Owner(IDLE_S)
    try:
        yield owner
    finally:
        await owner.stop()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


class Gate:
    """Blocks the owner thread until it is opened."""

    def __init__(self, owner: OwnerThread) -> None:
        self._opened = threading.Event()
        self.entered = threading.Event()
        owner.submit(self._wait)

    def _wait(self) -> None:
        self.entered.set()
        self._opened.wait()

    def open(self) -> None:
        self._opened.set()


async def test_everything_runs_in_order_on_the_one_thread() -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    async with owner_thread() as owner:
        for number in range(0, 100, 2):
            owner.submit(functools.partial(note, number))
            await owner.call(functools.partial(note, number + 1))
    assert ran == [(number, "test-owner") for number in range(100)]


async def test_a_call_gives_the_result_or_raises_the_exception() -> None:
    async with owner_thread() as owner:
        assert await owner.call(lambda: 6 * 7) == 42
        with pytest.raises(ZeroDivisionError):
            await owner.call(lambda: 1 // 0)
        assert await owner.call(lambda: "still there") == "still there"


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    ran: list[str] = []
    async with owner_thread() as owner:
        gate = Gate(owner)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await owner.call(lambda: ran.append("cancelled"))
        gate.open()
        await owner.call(lambda: ran.append("next"))
    assert ran == ["next"]


@pytest.mark.parametrize("error", [None, ValueError("too late")], ids=["returns", "raises"])
async def test_a_call_that_is_cancelled_while_it_runs_is_finished(error: Exception | None) -> None:
    ran: list[str] = []
    entered, opened = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        opened.wait()
        ran.append("finished")
        if error is not None:
            raise error

    async with owner_thread() as owner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owner.call, wait)
            await until(entered.is_set)
            tasks.cancel_scope.cancel()
        assert not ran
        opened.set()
        await owner.call(lambda: ran.append("next"))
    assert ran == ["finished", "next"]


async def test_stopping_runs_what_is_queued_and_ends_the_thread() -> None:
    ran: list[int] = []
    owner = Owner()
    await owner.poll_agent(Agent())
    gate = Gate(owner)
    for number in range(3 * COMMANDS_PER_ROUND):
        owner.submit(functools.partial(ran.append, number))
    assert "test-owner" in threads()
    gate.open()
    await owner.stop()
    assert ran == list(range(3 * COMMANDS_PER_ROUND))
    assert "test-owner" not in threads()


async def test_an_agent_is_polled_from_adoption_until_it_is_given_up() -> None:
    agent = Agent()
    async with owner_thread() as owner:
        await owner.rounds()
        assert agent.num_polls == 0
        await owner.poll_agent(agent)
        await until(lambda: agent.num_polls > 10)
        await owner.poll_agent(None)
        polled = agent.num_polls
        await owner.rounds()
        assert agent.num_polls == polled


async def test_an_agent_that_fails_is_reported_once_and_commands_go_on() -> None:
    agent, error = Agent(), RuntimeError("poll")
    async with owner_thread() as owner:
        await owner.poll_agent(agent)
        agent.error = error
        await until(lambda: owner.crashes)
        polled = agent.num_polls
        await owner.rounds()
        assert (owner.crashes, agent.num_polls) == ([error], polled)
        other = Agent()
        await owner.poll_agent(other)
        await until(lambda: other.num_polls)


async def test_completions_are_polled_for_within_a_burst_of_commands() -> None:
    log: list[str] = []
    async with owner_thread() as owner:
        await owner.poll_agent(Agent(log))
        gate = Gate(owner)
        await until(gate.entered.is_set)
        log.clear()
        for _ in range(5 * COMMANDS_PER_ROUND):
            owner.submit(functools.partial(log.append, "command"))
        gate.open()
        await owner.rounds(1)
    bursts = " ".join(log).split("poll")
    assert max(burst.count("command") for burst in bursts) <= COMMANDS_PER_ROUND
    assert log.count("command") == 5 * COMMANDS_PER_ROUND


async def test_a_short_call_is_made_at_once_while_the_thread_is_idle() -> None:
    ran: list[str] = []
    async with owner_thread() as owner:
        assert not owner.run_now(lambda: ran.append("without an agent"))
        await owner.poll_agent(Agent())
        await until(lambda: owner.run_now(lambda: ran.append(threading.current_thread().name)))
    assert ran == [threading.current_thread().name]


async def test_a_short_call_overtakes_no_command() -> None:
    ran: list[str] = []
    async with owner_thread() as owner:
        await owner.poll_agent(Agent())
        gate = Gate(owner)
        assert not owner.run_now(lambda: ran.append("while one waits or runs"))
        await until(gate.entered.is_set)
        assert not owner.run_now(lambda: ran.append("while one runs"))
        owner.submit(lambda: ran.append("command"))
        gate.open()
        await until(lambda: owner.run_now(lambda: ran.append("at once")))
    assert ran == ["command", "at once"]


async def test_the_thread_waits_for_a_short_call_and_then_polls_what_it_has_begun() -> None:
    log: list[str] = []
    agent = Agent(log)
    agent.busy = False
    async with owner_thread() as owner:
        await owner.poll_agent(agent)

        def begin() -> None:
            owner.submit(lambda: log.append("command"))
            log.append("begin")
            agent.busy = True

        await until(lambda: owner.run_now(begin))
        polled = agent.num_polls
        await until(lambda: agent.num_polls > polled + 2)
    assert log.index("begin") < log.index("command")


async def test_a_short_call_that_fails_is_a_crash() -> None:
    async with owner_thread() as owner:
        await owner.poll_agent(Agent())
        await until(lambda: owner.run_now([].pop))
        assert [type(error) for error in owner.crashes] == [IndexError]


async def test_polling_at_once_says_whether_anything_was_found() -> None:
    agent = Agent()
    agent.busy = False
    async with owner_thread() as owner:
        await owner.poll_agent(agent)
        await until(owner.poll_now)
        agent.eventful = False
        polled = agent.num_polls
        while agent.num_polls == polled:
            assert not owner.poll_now()


async def test_an_interrupted_short_call_does_not_keep_the_thread_out() -> None:
    """A signal handler may raise after the lock was taken and before it is released."""
    async with owner_thread() as owner:
        await owner.poll_agent(Agent())
        owner._in_use.acquire()
        assert await owner.call(lambda: 7) == 7


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[float | None]:
    """Record the timeout of each wait for a command by owner threads created from now on, which use this clock."""
    return record_waits(monkeypatch, clock)


async def test_the_wait_between_polls_follows_the_agent(waits: list[float | None]) -> None:
    agent = Agent()
    async with owner_thread() as owner:
        await owner.rounds()
        assert set(waits) <= {None, 0.0}
        await owner.poll_agent(agent)
        await until(lambda: BUSY_S in waits)
        agent.busy = False
        await until(lambda: waits[-1] == IDLE_S)
        waits.clear()
        await owner.rounds()
        assert set(waits) <= {0.0, IDLE_S}
        agent.busy = True
        await owner.rounds()
        await until(lambda: waits[-1] == BUSY_S)


async def test_the_longer_nothing_happens_the_longer_are_the_pauses(waits: list[float | None]) -> None:
    agent = Agent()
    async with owner_thread() as owner:
        await owner.poll_agent(agent)
        await until(lambda: waits.count(BUSY_S) > 10)
        agent.eventful = False
        await until(lambda: waits[-1] == QUIET_S)
        assert any(BUSY_S < wait < QUIET_S for wait in waits if wait)
        agent.eventful = True
        await until(lambda: waits[-1] == BUSY_S)
        agent.eventful = False
        await until(lambda: waits[-1] == QUIET_S)
        waits.clear()
        await owner.rounds()  # a command is an event too
        await until(lambda: BUSY_S in waits)


class SlowAgent(Agent):
    """Has an event every `gap_s`, and records how long the owner waits right after each."""

    def __init__(self, waits: list[float | None], clock: Clock, gap_s: float) -> None:
        super().__init__()
        self._waits = waits
        self._clock = clock
        self._gap_s = gap_s
        self._due_at = 0.0
        self._num_waits = 0
        self.waits_after: list[float | None] = []

    def poll(self) -> bool:
        if self._num_waits:
            self.waits_after.append(self._waits[self._num_waits])
            self._num_waits = 0
        if self._clock.monotonic() < self._due_at:
            return False
        self._due_at = self._clock.monotonic() + self._gap_s
        self._num_waits = len(self._waits)
        return True


async def test_what_comes_once_in_a_while_is_not_looked_for_right_after_it_came(
    waits: list[float | None], clock: Clock
) -> None:
    agent = SlowAgent(waits, clock, gap_s=10 * QUIET_S)
    async with owner_thread() as owner:
        await owner.poll_agent(agent)
        await until(lambda: len(agent.waits_after) > 2 * GAPS)
    assert BUSY_S in agent.waits_after[:GAPS]
    assert set(agent.waits_after[GAPS:]) == {QUIET_S}


def test_a_loop_that_has_ended_does_not_matter_to_the_thread() -> None:
    """`asyncio.run` leaves a call behind; the thread finishes it and serves another loop."""
    made: concurrent.futures.Future[Owner] = concurrent.futures.Future()
    opened = threading.Event()

    async def leave_behind() -> None:
        owner = Owner()
        made.set_result(owner)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(owner.call, opened.wait)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()

    async def use_again() -> None:
        owner = made.result()
        opened.set()
        assert await owner.call(lambda: 5) == 5
        await owner.stop()

    anyio.run(leave_behind)
    anyio.run(use_again)


async def test_what_a_fork_leaves_to_its_parent_is_not_used_and_never_destroyed() -> None:
    """This is the state in the child, where the thread does not exist."""
    agent, owner = Agent(), Owner()
    await owner.poll_agent(agent)
    await owner.stop()
    owner.abandon()
    held, ran = weakref.ref(agent), list[str]()
    owner.submit(lambda: ran.append("submitted"))
    assert not owner.run_now(lambda: ran.append("run"))
    with pytest.raises(BackendError, match="forked"):
        await owner.call(lambda: ran.append("called"))
    await owner.stop()
    assert not ran
    del agent, owner
    gc.collect()
    assert held() is not None


AT_EXIT = """
import atexit, functools, sys, threading, time
from kvflow.backends import owner_thread
from kvflow.backends.owner import OwnerThread, PollIntervals

begun, exiting = threading.Event(), threading.Event()

class Agent:
    def poll(self):
        begun.set()
        exiting.wait()
        {ending}
        print("returned", flush=True)
        return True

    def is_busy(self):
        return True

owner = OwnerThread("owner", print, PollIntervals(0.0, 0.0, 0.0))
owner.submit(functools.partial(owner.adopt, Agent()))
begun.wait()
owner.submit(lambda: print("not any more", flush=True))
owner_thread.EXIT_TIMEOUT_S = {timeout_s}
atexit.register(exiting.set)
sys.exit(3)
"""


UNTIL_DUE = "while not owner._barrier.is_due: time.sleep(1e-3)"


SHORT_CALL_AT_EXIT = """
import functools, sys, threading, time
from kvflow.backends.owner import OwnerThread, PollIntervals

begun = threading.Event()

class Agent:
    def poll(self):
        return False

    def is_busy(self):
        return False

    def may_sleep(self):
        return True

def call():
    begun.set()
    while not owner._barrier.is_due: time.sleep(1e-3)
    time.sleep(0.05)
    print("returned", flush=True)

def loop():
    while not owner.run_now(call):
        pass
    while True:
        owner.run_now(functools.partial(print, "not any more", flush=True))

owner = OwnerThread("owner", print, PollIntervals(0.0, 0.0, 0.0))
owner.submit(functools.partial(owner.adopt, Agent()))
threading.Thread(target=loop, daemon=True).start()
begun.wait()
sys.exit(3)
"""


async def test_the_process_ends_after_a_short_call_that_runs_in_another_thread() -> None:
    command = [sys.executable, "-c", SHORT_CALL_AT_EXIT]
    ended = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"returned\n", b"")


@pytest.mark.parametrize(
    ("ending", "timeout_s", "printed"),
    [(UNTIL_DUE, 60.0, b"returned\n"), ("threading.Event().wait()", 0.1, b"")],
    ids=["returns", "hangs"],
)
async def test_the_process_ends_after_the_call_that_runs(ending: str, timeout_s: float, printed: bytes) -> None:
    program = AT_EXIT.format(ending=ending, timeout_s=timeout_s)
    ended = await anyio.run_process([sys.executable, "-c", program], check=False, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, b"")
