"""One end of a control connection in a process of its own: `python -m tests.support.wire_process OPTIONS`.

A listener reports its endpoint, and echoes messages. A dialer sends a hello at first and after each break, and reports
`heard` and `lost`. On the order `fill`, either end sends more than the other one buffers without reading; on `renew`, a
listener accepts no peer any more; on `close`, either end closes. It reports `done` after each.
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from kvflow.control.channel import ZmqControl
from kvflow.trust import ClientKeys, Trust, TrustedKey

__all__ = ["WireOptions"]

FILLING = [bytes(100_000)] * 100


class WireOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keys of this end and public key of the other one, if any; endpoint to connect to, or none to listen."""

    public: str = ""
    secret: str = ""
    other: str = ""
    endpoint: str = ""

    @property
    def trust(self) -> Trust:
        return Trust(self.public, self.secret, (TrustedKey(self.other, "other"),) if self.other else ())


class Listening:
    def __init__(self, options: WireOptions) -> None:
        self._options = options
        self._last = b""
        self._listener = ZmqControl().listen("tcp://127.0.0.1:0", None, self._take, trust=options.trust)
        print(self._listener.endpoint, flush=True)

    def _take(self, name: bytes, frames: Sequence[bytes]) -> None:
        self._last = name
        self._listener.send(name, frames[0])

    def fill(self) -> None:
        for payload in FILLING:
            self._listener.send(self._last, payload)

    def renew(self) -> None:
        self._listener.renew(Trust(self._options.public, self._options.secret))

    def close(self) -> None:
        self._listener.close()


class Dialling:
    def __init__(self, options: WireOptions) -> None:
        keys = ClientKeys(options.trust, (options.other,)) if options.public else None
        self._connection = ZmqControl().connect(options.endpoint, self._take, self._lose, keys=keys)
        self._connection.send(b"hello")

    def _take(self, _frames: Sequence[bytes]) -> None:
        print("heard", flush=True)

    def _lose(self) -> None:
        print("lost", flush=True)
        self._connection.send(b"hello")

    def fill(self) -> None:
        for payload in FILLING:
            self._connection.send(payload)

    def close(self) -> None:
        self._connection.close()


async def main(options: WireOptions) -> None:
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    end = Dialling(options) if options.endpoint else Listening(options)

    def obey() -> None:
        order = sys.stdin.readline().strip()
        if not order:
            is_over.set()
            return
        getattr(end, order)()
        loop.call_later(0, partial(print, "done", flush=True))  # after work that it has deferred

    loop.add_reader(sys.stdin, obey)
    await is_over.wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=WireOptions)))
