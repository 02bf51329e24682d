"""Packing on a device that copies as late as it may, in an order between streams that nobody has asked for.

Every copier has a stream of its own, whose copies are made when that stream is synchronised, and not before.
"""

import dataclasses
from contextlib import AbstractContextManager

import pytest
import torch

from kvflow.backends import memory, nixl
from kvflow.packing import device
from kvflow.packing.device import DeviceCopier
from kvflow.testing.device import on_fake_device
from tests.service.test_packing_on_devices import RECEIVING, SENDING, device_pools
from tests.support.instances import deploy
from tests.support.streams import LateTorch, Stream

__all__ = ["device_pools"]

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("device_pools")]

CPU = torch.device("cpu")


class CopyStream(Stream):
    """A stream of a copier.

    Attributes:
        is_lost: Nobody waits for it.
    """

    is_lost = False

    def synchronize(self) -> None:
        if not self.is_lost:
            super().synchronize()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[CopyStream]:
    """The streams of the copiers, in the order of the ranks: prefill, decode."""
    found: list[CopyStream] = []
    create = DeviceCopier.__init__

    def on_stream(copier: DeviceCopier, on: torch.device) -> None:
        create(copier, on)
        found.append(CopyStream())
        copier._stream = found[-1]  # type: ignore[assignment] # has what a copier uses

    def current(stream: CopyStream) -> AbstractContextManager[object]:
        return LateTorch(stream)

    both = dataclasses.replace(memory.MemoryBackend.capabilities, memory_kinds=frozenset({"DRAM", "VRAM"}))
    monkeypatch.setattr(memory.MemoryBackend, "capabilities", both)
    monkeypatch.setattr(nixl, "NixlBackend", on_fake_device(nixl.NixlBackend))
    monkeypatch.setattr(device, "find_device", lambda _: CPU)
    monkeypatch.setattr(DeviceCopier, "__init__", on_stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return found


@pytest.mark.parametrize("backend", ["memory", "nixl"])
async def test_slots_are_sent_and_pages_reported_when_their_copies_are_made(
    backend: str, streams: list[CopyStream]
) -> None:
    async with deploy(backend, sending=SENDING, receiving=RECEIVING) as deployment:
        for room in range(3):
            request = deployment.request(room, 30)
            await request.hand_over(chunk=7)
            request.assert_arrived()
        staging = deployment.prefill[0].statistics().staging
        assert (staging.packed_posts > 3, staging.direct_posts) == (True, 0)
        assert [len(stream) for stream in streams] == [0, 0]


@pytest.mark.parametrize("side", [0, 1], ids=["gathering", "scattering"])
async def test_without_the_wait_for_a_stream_other_bytes_arrive(side: int, streams: list[CopyStream]) -> None:
    async with deploy(sending=SENDING, receiving=RECEIVING) as deployment:
        streams[side].is_lost = True
        request = deployment.request(1, 30)
        await request.hand_over(chunk=7)
        with pytest.raises(AssertionError):
            request.assert_arrived()
        assert [bool(len(stream)) for stream in streams] == [side == 0, side == 1]


async def test_memory_of_a_window_is_cleared_before_peers_may_write_to_it(streams: list[CopyStream]) -> None:
    """Clearing it later would erase what they have written."""
    async with deploy(sending=SENDING, receiving=RECEIVING):
        assert [len(stream) for stream in streams] == [0, 0]
