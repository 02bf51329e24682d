"""Cases that only `make test-all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.instances import BACKENDS

__all__ = ["MOONCAKE_SLOWLY", "on_backends", "slow_except"]


def slow_except(quick: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases of a parametrized test as slow, except for some.

    Args:
        quick: Those of the cases that `make test` also runs.
        cases: All cases, for `pytest.mark.parametrize`; a tuple holds several arguments.

    Raises:
        ValueError: A quick case is not among the cases.
    """
    every, wanted = list(cases), list(quick)
    if any(case not in every for case in wanted):
        raise ValueError(f"not among the cases: {[case for case in wanted if case not in every]}")
    return [case if case in wanted else _slow(case) for case in every]


def on_backends(over_nixl: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """Combine each case of a test with each backend, for tests in which the transport does the same in every case.

    Args:
        over_nixl: Those of the cases that `make test` also runs over NIXL. It runs all over memory, none over Mooncake.
        cases: All cases, as for `slow_except`. The name of the backend comes before the arguments of each.
    """
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    wanted = [case if isinstance(case, tuple) else (case,) for case in over_nixl]
    quick = [*(("memory", *case) for case in every), *(("nixl", *case) for case in wanted)]
    return slow_except(quick, [(backend, *case) for backend in BACKENDS for case in every])


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


MOONCAKE_SLOWLY = slow_except(["memory", "nixl"], BACKENDS)
"""Backends for tests with many ranks or cases: each Mooncake engine takes a second to close."""
