"""Methods of blocking classes that are those of the async ones: declared, documented and checked there."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["call_from_here", "call_on_loop"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


def call_on_loop(method: Callable[Concatenate[Any, Args], Result]) -> Callable[Concatenate[Any, Args], Result]:
    """Return a method that calls `method` of the async object on its event loop, after all earlier calls, and waits.

    It raises what `method` raises, and a LocalProtocolError if the event loop is not in use.
    """

    @functools.wraps(method)
    def call(blocking: Any, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        result: Result = blocking._call(lambda asynchronous: method(asynchronous, *args, **kwargs))
        return result

    return call


def call_from_here(method: Callable[Concatenate[Any, Args], Result]) -> Callable[Concatenate[Any, Args], Result]:
    """Return a method that calls `method`, which any thread may call, in the caller's thread, if the rank is open."""

    @functools.wraps(method)
    def call(rank: Any, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        rank._check_open()
        return method(rank._opened, *args, **kwargs)

    return call
