"""Effects of socket creation on the C library."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import zmq

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


def test_rand_keeps_its_sequence_when_threads_create_sockets_at_the_same_time() -> None:
    """A thread that ended last left `rand` with the state of another one."""

    def create_sockets() -> None:
        for _ in range(200):
            sockets.sockets.make(zmq.PAIR).close(0)

    before = state_of_rand()
    with ThreadPoolExecutor(4) as pool:
        for created in [pool.submit(create_sockets) for _ in range(4)]:
            created.result()
    assert state_of_rand() == before
