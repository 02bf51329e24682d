"""The writes of a NIXL agent from their start to their end.

An error proves little. The measurements behind this module, and the conclusions:

* An endpoint error (RemoteDisconnect: the peer was killed, its agent closed, or its connection broke) ends every post
  to that peer, and the source is no longer read: after 92 kills in the middle of 256 MiB, over CMA, shared memory and
  TCP, the kernel saw no page of it read. Such a post has ended after one more round of progress, in which the library
  cancels what is left. Over TCP, bytes may remain in the socket buffers of a live peer: they linger.
* Any other error leaves the endpoint usable, and earlier parts of the same post may still be in flight, so the post is
  in doubt. A later post over the same endpoint is a fence: when it is done, so is everything before it.

Source: nixl 1.5.1 (UCX 1.23) on Linux, host memory, one host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow.backends.base import BackendEvent, PostEnded, PostInDoubt
from kvflow.backends.nixl.posts import NativeEndpoint, Write
from kvflow.resources import error_text

__all__ = ["NativeWrite", "NativeWrites"]


@dataclass(eq=False)
class NativeWrite:
    """A native write that has started, for one post or several joined ones.

    Attributes:
        number: Sequence number of the post within its agent.
        fence: Once the post is in doubt, the number of the first post that can prove that it has ended.
    """

    post_ids: tuple[int, ...]
    connection: NativeEndpoint
    handle: Any
    number: int
    num_bytes: int
    fence: int = 0
    error: str = ""

    def ended(self, error: str | None, *, lingers: bool = False) -> list[PostEnded]:
        """Return a `PostEnded` for each joined post."""
        return [PostEnded(post_id, error, lingers) for post_id in self.post_ids]


class NativeWrites:
    """Writes that have started and may not have ended.

    Args:
        emit: Takes the events.
        clean_up: Makes a call of the library whose failure is only logged.
        disconnected: The library's error for a failed endpoint.
        has_fences: Whether a later write over an endpoint ends only after every earlier one.
    """

    def __init__(
        self,
        emit: Callable[[Sequence[BackendEvent]], None],
        clean_up: Callable[..., bool],
        disconnected: type[Exception],
        *,
        has_fences: bool,
    ) -> None:
        self._emit = emit
        self._clean_up = clean_up
        self._disconnected = disconnected
        self._has_fences = has_fences
        self._num_started = 0
        self._running: dict[int, NativeWrite] = {}
        self._in_doubt: dict[int, NativeWrite] = {}
        self._failed: dict[int, NativeWrite] = {}

    @property
    def num_running(self) -> int:
        """Number of writes that the library is still working on, as far as it says."""
        return len(self._running)

    @property
    def is_moving(self) -> bool:
        """Whether ends are expected soon."""
        return bool(self._running or self._failed)

    def is_used(self, connection: NativeEndpoint) -> bool:
        """Return whether a write over this endpoint has not ended."""
        return any(write.connection is connection for write in self._unended())

    def start(self, writes: Sequence[Write], connection: NativeEndpoint, handle: Any) -> None:
        """Start a prepared write of one or several joined posts."""
        num_bytes = sum(write.num_bytes for write in writes)
        started = NativeWrite(
            tuple(write.post_id for write in writes), connection, handle, self._num_started, num_bytes
        )
        self._num_started += 1
        self._follow(started, connection.agent.transfer)

    def poll(self) -> None:
        """Query the state of every running write."""
        for write in list(self._running.values()):
            self._follow(write, write.connection.agent.check_xfer_state)

    def end_failed(self) -> None:
        """End the writes over failed endpoints; call it once the library has made progress since `poll`."""
        for write in self._in_doubt.values():
            if write.connection.has_failed:
                self._failed[write.number] = write
        for number, write in self._failed.items():
            self._in_doubt.pop(number, None)
            self._end_write(write, write.error, lingers=True)
        self._failed.clear()

    def stop(self) -> list[PostEnded]:
        """Forget every write, and return their ends, to be reported once the agents are destroyed."""
        error = "stopped by closing the endpoint"
        stopped = [end for write in self._unended() for end in write.ended(error, lingers=True)]
        for writes in (self._running, self._in_doubt, self._failed):
            writes.clear()
        return stopped

    def _follow(self, write: NativeWrite, call: Callable[[Any], str]) -> None:
        """Start a write or query its state, and handle the result."""
        try:
            state = call(write.handle)
        except Exception as error:  # noqa: BLE001 - reported to the caller as an event
            self._running.pop(write.number, None)
            self._fail(write, error)
            return
        if state != "DONE":
            self._running[write.number] = write
            return
        self._running.pop(write.number, None)
        write.connection.is_used = True
        write.connection.path.count(write.num_bytes)
        self._end_write(write, None)
        if self._has_fences:
            self._end_fenced(write)

    def _fail(self, write: NativeWrite, error: Exception) -> None:
        write.error = error_text(error)
        write.connection.has_erred = True
        if isinstance(error, self._disconnected):
            write.connection.has_failed = True
            self._failed[write.number] = write
            return
        write.fence = self._num_started
        self._in_doubt[write.number] = write
        self._emit([PostInDoubt(post_id, write.error) for post_id in write.post_ids])

    def _end_write(self, write: NativeWrite, error: str | None, *, lingers: bool = False) -> None:
        self._clean_up(write.connection.agent.release_xfer_handle, write.handle)
        self._emit(write.ended(error, lingers=lingers))

    def _end_fenced(self, fence: NativeWrite) -> None:
        """End the writes in doubt for which a completed later one is a fence."""
        for write in list(self._in_doubt.values()):
            if write.connection is fence.connection and write.fence <= fence.number:
                del self._in_doubt[write.number]
                self._end_write(write, write.error)

    def _unended(self) -> list[NativeWrite]:
        return [*self._running.values(), *self._in_doubt.values(), *self._failed.values()]
