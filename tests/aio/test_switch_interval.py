"""A shorter switch interval of the interpreter, for as long as it is requested."""

import sys
from collections.abc import Iterator

import pytest

from kvflow.aio.switch_interval import SwitchInterval


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(before)


def test_the_shortest_need_counts_and_the_former_interval_comes_back() -> None:
    switching = SwitchInterval()
    switching.shorten(1e-3)
    switching.shorten(1e-4)
    switching.shorten(1e-4)
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    switching.restore(1e-4)
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    switching.restore(1e-4)
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    switching.restore(1e-3)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_a_shorter_interval_stays() -> None:
    switching = SwitchInterval()
    sys.setswitchinterval(1.01e-5)  # Python rounds down
    switching.shorten(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    switching.restore(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_an_interval_that_somebody_sets_meanwhile_stays() -> None:
    switching = SwitchInterval()
    switching.shorten(1e-3)
    sys.setswitchinterval(1e-2)
    switching.restore(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-2)
    switching.shorten(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-3)
    switching.restore(1e-3)
    assert sys.getswitchinterval() == pytest.approx(1e-2)
