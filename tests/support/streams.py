"""Streams and events of a device whose work is done when a test says so, in the order that it says."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from kvflow.testing.buffers import Bytes

__all__ = ["Event", "LateTorch", "Stream", "allow_access", "forbid_access"]

GARBAGE: Final = 0x5A
"""What is in memory of the device that it has not written yet."""

PROT_NONE, PROT_READ_AND_WRITE = 0, 3

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Stream:
    """A queue of work that is done in order, whatever other streams do."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how much is still to be done."""
        return len(self._waiting)

    def launch(self, work: Callable[[], object]) -> None:
        self._waiting.append(work)

    def run(self, count: int | None = None) -> None:
        """Do the next works; by default all of them."""
        with self._lock:  # several threads may wait for the stream
            for _ in range(len(self) if count is None else count):
                self._waiting.popleft()()

    def synchronize(self) -> None:
        """Do everything, as late as a device may."""
        with _disable_current_modes():
            self.run()


class Event:
    """An event like torch's.

    Attributes:
        cuda_event: 0 until it is recorded.
        num_waits: How often somebody has begun to wait for it.
    """

    def __init__(self) -> None:
        self.cuda_event = 0
        self.num_waits = 0
        self._has_fired = threading.Event()

    def record(self, stream: Stream) -> None:
        self.cuda_event = id(self)
        stream.launch(self._has_fired.set)

    def synchronize(self) -> None:
        self.num_waits += 1
        self._has_fired.wait()


def forbid_access(memory: Bytes) -> None:
    """Let every access to some whole pages of memory end the process with SIGSEGV."""
    _protect(memory, PROT_NONE)


def allow_access(memory: Bytes) -> None:
    _protect(memory, PROT_READ_AND_WRITE)


def _protect(memory: Bytes, rights: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), rights):
        raise OSError(ctypes.get_errno(), "mprotect")


class LateTorch(TorchDispatchMode):
    """Within the block, torch launches on a stream what it would compute; results have memory, with garbage in it."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.is_view:
            return func(*args, **named)
        if func._schema.is_mutable:
            self._stream.launch(lambda: func(*args, **named))
            return args[0]
        result = _memory_for(func, args, named)
        self._stream.launch(lambda: result.copy_(func(*args, **named)))
        return result


def _memory_for(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return memory for the result of an operation, without looking at what it computes with."""
    on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, dict(kwargs)))
    given, named = on_meta
    if "device" in named:
        named["device"] = "meta"
    shape = func(*given, **named)
    memory = torch.empty(shape.shape, dtype=shape.dtype)
    memory.view(torch.uint8).fill_(GARBAGE)
    return memory
