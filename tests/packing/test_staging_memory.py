"""How much staging memory a rank allocates, and where."""

import msgspec
import pytest

from kvflow.config import DecodeConfig, PrefillConfig
from kvflow.errors import Shortage
from kvflow.geometry import Location, MemoryRange
from kvflow.packing import staging
from kvflow.packing.copier import HostCopier
from kvflow.packing.staging import StagingMemory, staging_memory
from tests.support.pools import PagedShape, Pool

HOST = Pool(PagedShape(4, 2, (0, 1), 8, 1), 0).layout
DEVICE = msgspec.structs.replace(HOST, memory_kind="VRAM")

PREFILL = PrefillConfig(instance="p", registry="tcp://127.0.0.1:1")
OVERHEAD_S = 1e-6
DECODE = DecodeConfig(instance="d", registry="tcp://127.0.0.1:1")


@pytest.mark.parametrize(("config", "num_bytes"), [(PREFILL, 64 * 2**20), (DECODE, 384 * 2**20)], ids=["p", "d"])
def test_host_memory_is_taken_unasked(config: PrefillConfig | DecodeConfig, num_bytes: int) -> None:
    memory = staging_memory(config, HOST, OVERHEAD_S)
    assert memory is not None
    assert memory.range.length == num_bytes


@pytest.mark.parametrize("config", [PREFILL, DECODE], ids=["p", "d"])
def test_none_is_taken_unasked_where_descriptors_cost_nothing(config: PrefillConfig | DecodeConfig) -> None:
    """The rank would pack nothing."""
    assert staging_memory(config, HOST, 0.0) is None


def test_it_is_taken_there_if_the_settings_say_that_pieces_are_packed() -> None:
    asked = DecodeConfig(instance="d", registry="tcp://127.0.0.1:1", staging_bytes=2**25)
    packing = PrefillConfig(instance="p", registry="tcp://127.0.0.1:1", packing="always")
    assert all(staging_memory(config, HOST, 0.0) is not None for config in (asked, packing))


@pytest.mark.parametrize("config", [PREFILL, DECODE], ids=["p", "d"])
def test_device_memory_is_taken_only_if_it_is_asked_for(
    config: PrefillConfig | DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_copier_for", lambda _: HostCopier())  # as if torch could copy there
    assert staging_memory(config, DEVICE, OVERHEAD_S) is None
    asked = type(config)(instance="x", registry="tcp://127.0.0.1:1", staging_bytes=2**25)
    memory = staging_memory(asked, DEVICE, OVERHEAD_S)
    assert memory is not None
    assert memory.range.length == 2**25


@pytest.mark.parametrize("kind", ["DRAM", "VRAM"])
def test_rank_with_memory_in_several_places_does_not_pack(kind: str) -> None:
    (pages,) = HOST.allocations
    halves = tuple(
        msgspec.structs.replace(HOST.components[0], name=name, regions=(one,))
        for name, one in zip("ab", HOST.components[0].regions, strict=False)
    )
    first, second = (one.regions[0] for one in halves)
    layout = msgspec.structs.replace(
        HOST,
        components=halves,
        allocations=(
            MemoryRange(first.address, first.span),
            MemoryRange(second.address, second.span, Location("VRAM", 1)),
        ),
        memory_kind=kind,
    )
    assert pages.address == first.address
    asked = DecodeConfig(instance="x", registry="tcp://127.0.0.1:1", staging_bytes=2**25)
    assert staging_memory(asked, layout, OVERHEAD_S) is None


def test_staging_memory_is_where_the_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if only the allocations tell where the pages are."""
    monkeypatch.setattr(staging, "_copier_for", lambda _: HostCopier())  # as if torch could copy there
    gpu = Location("VRAM", 2)
    moved = tuple(msgspec.structs.replace(one, location=gpu) for one in HOST.allocations)
    layout = msgspec.structs.replace(HOST, allocations=moved)
    memory = staging_memory(
        DecodeConfig(instance="x", registry="tcp://127.0.0.1:1", staging_bytes=2**25), layout, OVERHEAD_S
    )
    assert memory is not None
    assert memory.added_to(layout).registered_locations == {gpu}


def test_host_without_memory_says_which_setting_asks_for_it_and_which_limit_there_is() -> None:
    with pytest.raises(Shortage, match=r"staging_bytes.*ENOMEM.*RLIMIT_AS is"):
        StagingMemory(2**50, HostCopier())
