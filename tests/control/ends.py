"""Both ends of a control connection, which keep received messages."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from kvflow.control.channel import ZmqControl
from kvflow.trust import PLAIN, ClientKeys, Trust
from tests.support.waiting import until

__all__ = ["LOCAL", "Client", "Server", "connected", "meet"]

LOCAL: Final = "tcp://127.0.0.1:0"


class Server:
    """A listener that keeps received messages."""

    def __init__(self, bind: str = LOCAL, advertise: str | None = None, *, trust: Trust = PLAIN) -> None:
        self.received: list[tuple[bytes, list[bytes]]] = []
        self.refused: list[str] = []
        self.kinds: list[str] = []
        self.listener = ZmqControl().listen(bind, advertise, self._take, trust=trust, on_refused=self._refuse)
        self.endpoint = self.listener.endpoint
        self.send = self.listener.send
        self.close = self.listener.close

    async def receive(self) -> tuple[bytes, list[bytes]]:
        await until(lambda: self.received)
        return self.received.pop(0)

    def _refuse(self, kind: str, detail: str) -> None:
        self.kinds.append(kind)
        self.refused.append(detail)

    def _take(self, name: bytes, frames: Sequence[bytes]) -> None:
        self.received.append((name, list(frames)))


class Client:
    """A connection that keeps received messages, and counts its breaks."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self.received: list[list[bytes]] = []
        self.refused: list[str] = []
        self.num_lost = 0
        self.endpoint = endpoint
        self.connection = ZmqControl().connect(
            endpoint, self._take, self._lose, keys=keys, on_refused=self.refused.append
        )
        self.send = self.connection.send
        self.close = self.connection.close

    async def receive(self) -> list[bytes]:
        await until(lambda: self.received)
        return self.received.pop(0)

    def _take(self, frames: Sequence[bytes]) -> None:
        self.received.append(list(frames))

    def _lose(self) -> None:
        self.num_lost += 1


@contextmanager
def connected(bind: str = LOCAL) -> Iterator[tuple[Server, Client]]:
    with closing(Server(bind)) as server, closing(Client(server.endpoint)) as client:
        yield server, client


async def meet(server: Server, client: Client) -> bytes:
    """Exchange a message each way; return the client's name."""
    client.send(b"hello")
    name, frames = await server.receive()
    assert frames == [b"hello"]
    server.send(name, b"welcome")
    assert await client.receive() == [b"welcome"]
    return name
