"""What an engine's objects raise fails one request; what signals raise ends the process."""

import signal
import threading
from collections.abc import Callable

import pytest

from kvflow.engines.containment import contained
from kvflow.errors import ConfigError
from tests.engines.raising import ERRORS, Raising, Unprintable, name_of


def failed(act: Callable[[], object]) -> list[str]:
    reasons: list[str] = []
    with contained(reasons.append):
        act()
    return reasons


@pytest.mark.parametrize("error", [*ERRORS, StopIteration()], ids=name_of)
def test_whatever_is_raised_fails_the_request_alone(error: BaseException) -> None:
    (reason,) = failed(lambda: len(Raising(error)))
    assert reason.startswith(type(error).__name__)


def test_errors_of_kvflow_are_told_as_they_are() -> None:
    assert failed(lambda: len(Raising(ConfigError("wrong", found=1)))) == ["wrong (found=1)"]
    assert failed(lambda: len(Raising(ConfigError("wrong", found=Unprintable())))) != []


def test_nothing_raised() -> None:
    assert failed(lambda: None) == []


def test_a_keyboard_interrupt_is_for_the_process_on_the_thread_that_signals_interrupt() -> None:
    reasons: list[str] = []
    with pytest.raises(KeyboardInterrupt), contained(reasons.append):
        len(Raising(KeyboardInterrupt()))
    assert reasons
    elsewhere: list[list[str]] = []
    thread = threading.Thread(target=lambda: elsewhere.append(failed(lambda: len(Raising(KeyboardInterrupt())))))
    thread.start()
    thread.join()
    assert len(elsewhere[0]) == 1


def test_what_a_signal_handler_raises_is_for_the_process() -> None:
    """VLLM ends its workers so."""

    def end(*_: object) -> None:
        raise SystemExit

    reasons: list[str] = []
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit), contained(reasons.append):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert reasons == ["SystemExit: "]
