"""Each field of `Bounds`, at the limit and just over it: accepted, made to wait, or refused by name; never abuse."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

import anyio
import numpy as np
import pytest

from kvflow.bounds import Bounds
from kvflow.config import Limits
from kvflow.errors import CapacityExceeded, FailureReason, KvflowError, PlanError
from kvflow.state import events as ev
from kvflow.state.effects import CountAnomaly, PrefillEffect
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.wire.messages import Failed, Refuse
from tests.service.test_limits import pair
from tests.support.cores import (
    ABORTED,
    DECODE,
    DecodeDriver,
    PrefillDriver,
    grant,
    messages,
    peer,
)
from tests.support.receiving import request
from tests.support.sending import chunk

pytestmark = pytest.mark.anyio

AT: Final = 8


def _names(error: KvflowError, setting: str) -> None:
    assert error.values["setting"] == f"limits.{setting}"
    assert error.values["limit"] == AT


def over_transfers() -> None:
    prefill, decode = PrefillDriver(limits=Limits(transfers=AT)), DecodeDriver(limits=Limits(transfers=AT))
    for room in range(1, AT + 1):
        prefill(ev.SendOpened(room))
        decode(request(room, room=room))
    with pytest.raises(CapacityExceeded) as caught:
        prefill(ev.SendOpened(AT + 1))
    _names(caught.value, "transfers")
    with pytest.raises(CapacityExceeded) as caught:
        decode(request(AT + 1, room=AT + 1))
    _names(caught.value, "transfers")


def over_peers() -> None:
    core = PrefillDriver(limits=Limits(peers=AT))
    for number in range(AT // 2):
        core.connect(peer("greedy", number))
    newcomer = peer("greedy", AT)
    ((_, refused),) = messages(core.hear(newcomer, core.hello(newcomer)), Refuse)
    assert isinstance(refused, Refuse)
    assert f"{AT // 2} decode ranks are connected, limits.peers={AT}" in refused.detail
    core.connect(peer("honest"))


def _over_waiting(setting: str, size: int, detail: str) -> None:
    core = PrefillDriver(limits=Bounds(**{setting: AT * size}))
    core.connect()
    for room in range(AT // 2):
        assert core.hear(DECODE, grant(room)) == []
    effects = core.hear(DECODE, grant(AT))
    _is_refused(effects, detail.format(AT * size))
    assert DECODE in core.core.peers
    core(ev.SendOpened(0))
    assert core.hear(DECODE, grant(AT, generation=2)) == [], "there is place again"


def _is_refused(effects: Sequence[PrefillEffect], detail: str) -> None:
    ((_, failed),) = messages(effects, Failed)
    assert isinstance(failed, Failed)
    assert failed.failure.reason is FailureReason.CAPACITY
    assert detail in failed.failure.detail
    assert not any(isinstance(effect, CountAnomaly) for effect in effects)


def over_quarantine() -> None:
    quarantine = Quarantine(AT)
    quarantine.add_pages(1, Footprint(AT - 1, AT - 1))
    quarantine.check_admission()
    quarantine.add_pages(2, Footprint(1, 1))
    with pytest.raises(CapacityExceeded) as caught:
        quarantine.check_admission()
    _names(caught.value, "quarantined_bytes")


def over_unfenced() -> None:
    core = PrefillDriver(limits=Bounds(unfenced=AT))
    core.connect()
    core(ev.SendOpened(1))
    core.hear(DECODE, grant(1))
    core(chunk(0, 8, room=1, last=True))
    core(ev.PostEnded(ev.DeliveryId(1, DECODE, 1), 0, ABORTED, True))
    core(ev.SendOpened(2))
    _is_refused(core.hear(DECODE, grant(2, generation=2)), f"a limit of {AT} allows 1")


def over_metadata_bytes() -> None:
    async def run() -> None:
        async with pair(1, limits=Limits(metadata_bytes=AT)) as both, both.prefill.send(1) as sender:
            with pytest.raises(PlanError) as caught:
                await sender.finish((0, 1), {"kv": [0]}, metadata=bytes(AT + 1))
            _names(caught.value, "metadata_bytes")
            assert caught.value.values["num_bytes"] == AT + 1
            await sender.finish((0, 1), {"kv": [0]}, metadata=bytes(AT))
            pages = {"kv": [0]}
            async with both.decode.receive(1, prefill=both.prefill.endpoint, tokens=(0, 1), pages=pages) as receiver:
                assert (await receiver.done()).metadata == bytes(AT)

    anyio.run(run)


def waits(setting: str, *, background: bool = False) -> Callable[[], None]:
    """Return a check that a transfer of many times as much as this limit only takes longer."""

    async def run() -> None:
        num_pages = 4 * AT
        async with pair(num_pages, limits=Bounds(**{setting: 1})) as both:

            async def send() -> None:
                async with both.prefill.send(1, background=background) as sender:
                    for page in range(num_pages):
                        await sender.chunk((page, page + 1), {"kv": [page]})
                    await sender.finish((num_pages, num_pages), {})

            pages = {"kv": np.arange(num_pages)}
            endpoint = both.prefill.endpoint
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                async with both.decode.receive(1, prefill=endpoint, tokens=(0, num_pages), pages=pages) as receiver:
                    await receiver.done()
            np.testing.assert_array_equal(both.source, both.target)
            assert both.anomalies() == [{}, {}]

    return lambda: anyio.run(run)


CHECKS: Final[dict[str, Callable[[], None]]] = {
    "transfers": over_transfers,
    "peers": over_peers,
    "pending_grants": lambda: _over_waiting("pending_grants", 1, "{} grants"),
    "pending_grant_bytes": lambda: _over_waiting("pending_grant_bytes", 16, "limits.pending_grant_bytes={}"),
    "quarantined_bytes": over_quarantine,
    "unfenced": over_unfenced,
    "metadata_bytes": over_metadata_bytes,
    **{
        setting: waits(setting)
        for setting in (
            "queued_chunks",
            "bytes_per_post",
            "bytes_per_layer_piece",
            "posts_per_peer",
            "bytes_per_peer",
            "descriptors_per_peer",
            "descriptors_planned_inline",
        )
    },
    "bytes_per_background_post": waits("bytes_per_background_post", background=True),
}


@pytest.mark.parametrize("limit", [item.name for item in fields(Bounds) if item.name != "ageing_s"])
def test_what_is_over_a_limit_waits_or_is_refused_by_its_name(limit: str) -> None:
    """A new field fails until it is listed."""
    CHECKS[limit]()
