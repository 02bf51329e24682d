"""Effects of socket creation on the C library."""

import ctypes

from kvflow.control import sockets


def state_of_rand() -> int | None:
    """Return the address of the memory that C's `rand` uses."""
    libc = ctypes.CDLL(None)
    libc.initstate.restype = ctypes.c_void_p
    own = ctypes.create_string_buffer(sockets.RAND_STATE_BYTES)
    address: int | None = libc.initstate(1, own, ctypes.c_size_t(len(own)))
    libc.setstate(ctypes.c_void_p(address))
    return address


def test_rand_goes_on_with_its_own_sequence() -> None:
    before = state_of_rand()
    with sockets._seeded():
        assert state_of_rand() != before
    assert state_of_rand() == before


def test_rand_never_uses_memory_that_was_freed() -> None:
    """Two threads that created sockets at the same time left `rand` with the first one's state, which was freed."""
    before = state_of_rand()
    first, second = sockets._seeded(), sockets._seeded()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    try:
        assert state_of_rand() in (before, ctypes.addressof(sockets._RAND_STATE))
    finally:
        ctypes.CDLL(None).setstate(ctypes.c_void_p(before))
