"""Mooncake against peers in real processes, which hang, die, and come back at a former address."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from kvflow.backends.base import PostEnded
from kvflow.backends.metadata import PeerMetadata
from kvflow.backends.mooncake import MooncakeBackend, agent, backend
from kvflow.backends.mooncake.address import INCARNATION_BYTES, EndpointAddress
from kvflow.errors import BackendError
from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract.suite.processes import PIECE, Target, target_process
from tests.backends.endpoints import Endpoint, copies, open_backend, open_endpoints, same
from tests.support.stopping import is_stopped
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SIZE = 16 * 2**20
LANES = 4
"""Connections that the library opens to a peer; each carries one descriptor at a time."""

FILL = 7


class Peer(Target):
    """An endpoint in another process."""

    @property
    def endpoint(self) -> EndpointAddress:
        return EndpointAddress.unpack(unsealed(self.metadata).agent, agent=self.name, protocol="tcp")

    def metadata_with(self, **changes: object) -> bytes:
        """Return its metadata with some fields of the address changed."""
        address = msgspec.structs.replace(self.endpoint, **changes)
        return msgspec.structs.replace(unsealed(self.metadata), agent=address.pack()).pack()

    async def stop(self) -> None:
        """Stop its process, and wait until all of its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        await until(lambda: is_stopped(self.process.pid))

    def all_of(self, source: Endpoint) -> Descriptors:
        """Return copies of the whole memory of the source."""
        return self.pieces(source, *range(SIZE // PIECE))


def unsealed(metadata: bytes) -> PeerMetadata:
    return PeerMetadata.unpack(metadata, backend="mooncake")


@asynccontextmanager
async def open_peer() -> AsyncIterator[Peer]:
    async with target_process("mooncake", SIZE) as target:
        peer = Peer(target.name, target.process)
        peer.address, peer.metadata = target.address, target.metadata
        yield peer


@asynccontextmanager
async def open_source() -> AsyncIterator[Endpoint]:
    async with open_backend(MooncakeBackend(close_timeout_s=0.1), SIZE) as source:
        source.memory[:] = FILL
        yield source


async def write_everything(source: Endpoint, peer: Peer, post_id: int) -> None:
    source.backend.post(post_id, peer.name, peer.all_of(source), b"")
    assert await source.take_end(post_id) == PostEnded(post_id, None)
    assert await peer.count(FILL) == SIZE


async def test_bytes_go_to_another_process() -> None:
    async with open_source() as source, open_peer() as peer:
        await source.backend.connect(peer.name, peer.metadata)
        await write_everything(source, peer, 1)


async def test_posts_to_a_process_that_was_killed_end_by_themselves() -> None:
    async with open_source() as source, open_peer() as peer, open_peer() as other:
        await source.backend.connect(peer.name, peer.metadata)
        await source.backend.connect(other.name, other.metadata)
        await peer.stop()
        for post_id in range(3):
            source.backend.post(post_id, peer.name, peer.all_of(source), b"")
        await peer.kill()
        await source.take_ends(3)
        assert {(end.error is None, end.lingers) for end in source.ends()} == {(False, False)}
        await write_everything(source, other, 9)
        with pytest.raises(BackendError, match="cannot be reached"):
            await source.backend.connect("the next incarnation", peer.metadata_with(agent="the next incarnation"))


async def test_what_was_written_to_a_process_that_hangs_lingers_and_lands_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timeout proves nothing: the bytes land long after the post has ended here."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    async with open_source() as source, open_peer() as peer, open_peer() as other:
        await source.backend.connect(peer.name, peer.metadata)
        await source.backend.connect(other.name, other.metadata)
        await peer.stop()
        everything = peer.all_of(source)
        source.backend.post(1, peer.name, Descriptors(everything.src[:LANES], everything.dst[:LANES]), b"")
        await write_everything(source, other, 2)
        await source.take_ends(2)
        peer.process.send_signal(signal.SIGCONT)
        while not await peer.count(FILL):  # what has reached its kernel; what has not is dropped
            pass
        ends = {end.post_id: (end.error is None, end.lingers) for end in source.ends()}
        assert ends == {1: (False, True), 2: (True, False)}


async def test_closing_stops_what_a_hung_process_holds_up_and_says_what_may_still_land() -> None:
    async with open_source() as source, open_peer() as peer:
        await source.backend.connect(peer.name, peer.metadata)
        await peer.stop()
        for post_id in range(6):  # the first four fill the window, the others do not start
            source.backend.post(post_id, peer.name, peer.all_of(source), b"")
        await source.close()
        after = {end.post_id: (end.error is None, end.lingers) for end in source.ends()}
        assert after == dict.fromkeys(range(4), (False, True)) | dict.fromkeys((4, 5), (False, False))
        source.memory[:] = FILL + 1
        peer.process.send_signal(signal.SIGCONT)
        while not await peer.count(FILL):
            pass
        assert await peer.count(FILL + 1) == 0


def port_of(listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> int:
    return listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's


@asynccontextmanager
async def forwarder(upstreams: list[tuple[str, int]]) -> AsyncIterator[int]:
    """Forward connections to the last of some addresses, as a host does on which processes come and go."""

    async def serve(client: anyio.abc.SocketStream) -> None:
        async with client, await anyio.connect_tcp(*upstreams[-1]) as upstream, anyio.create_task_group() as tasks:
            tasks.start_soon(pump, upstream, client)
            await pump(client, upstream)

    async def pump(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
        try:
            async for data in source:
                await target.send(data)
            await target.send_eof()
        except (anyio.BrokenResourceError, OSError):
            pass

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield port_of(listener)
        tasks.cancel_scope.cancel()


def endpoint_of(address: EndpointAddress) -> tuple[str, int]:
    host, _, port = address.session.rpartition(":")
    return host, int(port)


async def test_a_process_that_comes_back_under_the_same_address_is_reached() -> None:
    """The engine caches the data port of the first incarnation, and would never ask for the new one."""
    upstreams: list[tuple[str, int]] = []
    async with open_source() as source, forwarder(upstreams) as port:
        for post_id in range(3):
            async with open_peer() as peer:
                upstreams.append(endpoint_of(peer.endpoint))
                await source.backend.connect(peer.name, peer.metadata_with(session=f"127.0.0.1:{port}"))
                await write_everything(source, peer, post_id)
                await peer.kill()


async def test_the_address_of_an_incarnation_that_is_over_is_refused() -> None:
    """Another incarnation listens there now, and the pages of the old one have no owner."""
    upstreams: list[tuple[str, int]] = []
    async with open_source() as source, forwarder(upstreams) as port, open_peer() as first, open_peer() as second:
        session = f"127.0.0.1:{port}"
        upstreams += [endpoint_of(first.endpoint), endpoint_of(second.endpoint)]
        with pytest.raises(BackendError):
            await source.backend.connect(first.name, first.metadata_with(session=session))
        await source.backend.connect(second.name, second.metadata_with(session=session))
        await write_everything(source, second, 1)
        assert await first.count(FILL) == 0


async def test_a_wrong_incarnation_is_refused_and_needs_no_engine() -> None:
    async with open_source() as source, open_peer() as peer:
        for _ in range(3):
            with pytest.raises(BackendError, match="a different process answers"):
                await source.backend.connect(peer.name, peer.metadata_with(incarnation=bytes(INCARNATION_BYTES)))
        await source.backend.connect(peer.name, peer.metadata)
        await write_everything(source, peer, 1)


def claimed(victim: Endpoint, host: str, at: int) -> bytes:
    """Return metadata of a peer that claims the session of an endpoint, with bytes that it knows in its memory."""
    theirs = unsealed(victim.backend.metadata())
    address = EndpointAddress.unpack(theirs.agent, agent=victim.name, protocol="tcp")
    known = bytes(victim.memory[at : at + INCARNATION_BYTES])
    session = address.session.replace("127.0.0.1", host)
    place = theirs.memory.ranges[0].address + at
    liar = EndpointAddress("liar", "tcp", session, known, place)
    return msgspec.structs.replace(theirs, agent=liar.pack()).pack()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
async def test_the_session_of_another_endpoint_is_refused(host: str) -> None:
    """Otherwise kvflow would write to pages that their owner never granted."""
    async with open_endpoints("mooncake", SIZE) as (source, target):
        for victim in (source, target):
            for at in (0, SIZE // 2, SIZE - INCARNATION_BYTES):
                with pytest.raises(BackendError, match="the session of another one"):
                    await source.backend.connect("liar", claimed(victim, host, at))
        source.post(1, target, copies(source, target))
        assert (await source.take_end(1)).error is None


async def test_an_incarnation_in_the_cell_of_another_endpoint_is_refused() -> None:
    """Slots near an incarnation briefly hold what was read from peers, so a liar could know their content."""
    async with open_endpoints("mooncake") as (source, target):
        for victim in (source, target):
            theirs = unsealed(victim.backend.metadata())
            address = EndpointAddress.unpack(theirs.agent, agent=victim.name, protocol="tcp")
            liar = msgspec.structs.replace(
                address, agent="liar", incarnation=bytes(16), incarnation_address=address.incarnation_address + 160
            )
            with pytest.raises(BackendError, match="the session of another one"):
                await source.backend.connect("liar", msgspec.structs.replace(theirs, agent=liar.pack()).pack())


@pytest.mark.slow
async def test_peers_with_equal_addresses_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked processes have their memory at the same addresses."""
    monkeypatch.setattr(backend, "_is_in", lambda *_: True)
    async with open_endpoints("mooncake", count=3) as endpoints:
        for post_id, target in enumerate(endpoints[1:]):
            endpoints[0].post(post_id, target, copies(endpoints[0], target))
            assert (await endpoints[0].take_end(post_id)).error is None


async def test_memory_that_cannot_be_read_is_refused_and_costs_no_engine() -> None:
    async with open_source() as source, open_peer() as peer:
        await source.backend.connect(peer.name, peer.metadata)
        num_threads = []
        for _ in range(3):
            with pytest.raises(BackendError, match="its memory cannot be reached"):
                await source.backend.connect("liar", peer.metadata_with(agent="liar", incarnation_address=4096))
            num_threads.append(count("task"))
        assert num_threads[1:] == [num_threads[0]] * 2
        await write_everything(source, peer, 1)


async def test_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MAX_REPLACED", 0)
    async with open_source() as source, open_peer() as peer:
        with pytest.raises(BackendError, match="too many Mooncake engines"):
            await source.backend.connect(peer.name, peer.metadata_with(incarnation_address=4096))
        await source.backend.connect(peer.name, peer.metadata)
        await write_everything(source, peer, 1)


@pytest.mark.slow
async def test_peers_that_have_left_leave_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library never closes an engine's connections, so kvflow retires engines; a peer that stays keeps its own."""
    monkeypatch.setattr(agent, "MAX_DEPARTED", 2)
    async with open_backend(MooncakeBackend()) as source, open_backend(MooncakeBackend()) as staying:
        await source.connect(staying)
        num_files = []
        for number in range(12):
            async with open_backend(MooncakeBackend()) as leaving:
                await source.connect(leaving)
                for other, post_id in ((leaving, 2 * number), (staying, 2 * number + 1)):
                    source.post(post_id, other, copies(source, other, range(0, 1024, 64)))
                    await source.take_end(post_id)
                await source.backend.disconnect(leaving.name)
            num_files.append(count("fd"))
        assert max(num_files[6:]) <= max(num_files[:6]) + 2 * LANES  # and not six times as many
        assert {end.error for end in source.ends()} == {None}


def count(kind: str) -> int:
    """Return the number of threads ("task") or open files ("fd") of this process."""
    return len(list(Path("/proc/self", kind).iterdir()))


async def test_a_peer_that_accepts_and_says_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        open_endpoints("mooncake", 4096) as (source, target),
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
    ):
        monkeypatch.setattr(source.backend, "_connect_timeout_s", 0.3)  # not for live peers, which may take longer
        port = port_of(listener)
        theirs = EndpointAddress.unpack(unsealed(target.backend.metadata()).agent, agent=target.name, protocol="tcp")
        silent = msgspec.structs.replace(theirs, agent="silent", session=f"127.0.0.1:{port}")
        metadata = msgspec.structs.replace(unsealed(target.backend.metadata()), agent=silent.pack()).pack()

        async def connect_to_silence() -> None:
            with pytest.raises(BackendError, match="does not answer"):
                await source.backend.connect("silent", metadata)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect_to_silence)
            source.post(1, target, copies(source, target))
            await source.take_ends()
            assert same(source, target, 0, 64)
        source.post(2, target, copies(source, target, (128,)))
        await source.take_ends(2)
        assert {end.error for end in source.ends()} == {None}
