"""Is anybody there? A question to a host's operating system, not to a peer."""

import sys

import anyio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

__all__ = ["is_refused"]


async def is_refused(endpoint: str, timeout_s: float) -> bool:
    """Say whether the host of an address says that nobody listens there.

    Silence says nothing: a host that is off or cut off looks like that, and so does a process that hangs.

    Args:
        endpoint: "tcp://host:port", the address of a process itself, not of a balancer in front of several.
        timeout_s: How long to wait for the host.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with anyio.move_on_after(timeout_s):
        try:
            stream = await anyio.connect_tcp(host.strip("[]"), int(port))
        except OSError as error:
            return _is_refusal(error.__cause__)
        await stream.aclose()
    return False


def _is_refusal(cause: BaseException | None) -> bool:
    """Every address of the host refused."""
    if isinstance(cause, BaseExceptionGroup):
        return all(_is_refusal(part) for part in cause.exceptions)
    return isinstance(cause, ConnectionRefusedError)
