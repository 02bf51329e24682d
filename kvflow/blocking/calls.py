"""How methods of blocking classes follow those of the async ones, whose arguments are declared and checked there."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["call_from_here", "call_on_loop", "with_arguments_of"]

Args = ParamSpec("Args")
Result = TypeVar("Result")
Method = Callable[Concatenate[Any, Args], Result]


def call_on_loop(method: Method[Args, Result]) -> Method[Args, Result]:
    """Return a method that calls `method` of the async object on its event loop, after all earlier calls, and waits.

    It raises what `method` raises, and a LocalProtocolError if the event loop is not in use.
    """

    @functools.wraps(method)
    def call(blocking: Any, /, *args: Args.args, **options: Args.kwargs) -> Result:
        result: Result = blocking._call(lambda asynchronous: method(asynchronous, *args, **options))
        return result

    return call


def call_from_here(method: Method[Args, Result]) -> Method[Args, Result]:
    """Return a method that calls `method`, which any thread may call, in the caller's thread, if the rank is open."""

    @functools.wraps(method)
    def call(rank: Any, /, *args: Args.args, **options: Args.kwargs) -> Result:
        rank._check_open()
        return method(rank._opened, *args, **options)

    return call


def with_arguments_of(method: Method[Args, Any]) -> Callable[[Callable[..., Result]], Method[Args, Result]]:
    """Decorate a method that passes its arguments on to `method`: callers and type checkers see those of `method`."""

    def decorate(function: Callable[..., Result]) -> Method[Args, Result]:
        function.__wrapped__ = method  # type: ignore[attr-defined] # as `functools.wraps` does
        return function

    return decorate
