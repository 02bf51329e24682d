"""Settings are checked once, and errors name the setting."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import pytest

from kvflow.addresses import Endpoint, join_address, split_address, split_bind
from kvflow.config import (
    MAX_INSTANCE_CHARACTERS,
    MAX_METADATA_BYTES,
    DecodeConfig,
    Limits,
    PrefillConfig,
    Proofs,
    Timeouts,
    is_instance_name,
)
from kvflow.errors import ConfigError
from kvflow.gate.sizes import MAX_MESSAGE_BYTES
from kvflow.trust import Trust

REGISTRY: Final = "tcp://127.0.0.1:7100"

Make = Callable[..., PrefillConfig | DecodeConfig | Endpoint]


def prefill(**settings: Any) -> PrefillConfig:
    return PrefillConfig(**{"instance": "p", "registry": REGISTRY} | settings)


def decode(**settings: Any) -> DecodeConfig:
    return DecodeConfig(**{"instance": "d", "registry": REGISTRY} | settings)


def endpoint(**settings: Any) -> Endpoint:
    fields: dict[str, Any] = {"host": "h", "port": 1}
    return Endpoint(**fields | settings)


BAD: Final[list[tuple[str, object]]] = [
    ("instance", ""),
    ("instance", 5),
    ("instance", None),
    ("instance", b"p"),
    ("instance", "\ud800"),
    ("instance", "x" * (MAX_INSTANCE_CHARACTERS + 1)),
    ("instance", "tcp://127.0.0.1:7000"),
    ("engine_rank", -1),
    ("engine_rank", 1),
    ("engine_rank", 0.5),
    ("engine_rank", "0"),
    ("engine_rank", False),
    ("num_ranks", 0),
    ("num_ranks", "2"),
    ("num_ranks", 2.0),
    ("num_ranks", None),
    ("num_ranks", 2**32),
    ("registry", ""),
    ("registry", b"tcp://127.0.0.1:7100"),
    ("registry", "127.0.0.1:7100"),
    ("registry", "tcp://127.0.0.1"),
    ("registry", "tcp://127.0.0.1:65536"),
    ("registry", "tcp://a b:1"),
    ("registry", "tcp://[127.0.0.1]:1"),
    ("registry", "tcp://[fe80::1%enp65s0f1np1x]:1"),  # interface names are shorter
    ("registry", "tcp://::1:1"),
    ("registry", "tcp://*:1"),
    ("registry", "tcp://0.0.0.0:7100"),
    ("registry", "tcp://[::]:7100"),
    ("registry", "tcp://h:0"),
    ("backend", None),
    ("backend", ""),
    ("backend_options", {1: 2}),
    ("backend_options", None),
    ("backend_options", [("host", "x")]),
    ("timeouts", None),
    ("timeouts", {}),
    ("limits", {}),
    ("staging_bytes", -1),
    ("staging_bytes", 0.5),
    ("staging_bytes", "1"),
    ("staging_bytes", True),
    ("staging_bytes", 2**50),
    ("staging_bytes", 10),
    ("staging_bytes", 8 * 2**20 - 1),
    ("staging_slot_bytes", 0),
    ("staging_slot_bytes", 8e6),
    ("record", 5),
    ("record", b"events"),
]

BAD_PREFILL: Final[list[tuple[str, object]]] = [
    ("bind", None),
    ("bind", "ipc:///x"),
    ("advertise", "tcp://x:1"),
    ("advertise", "x:1"),
    ("advertise", ""),
    ("advertise", 7),
    ("advertise", "0.0.0.0"),  # noqa: S104 - refused
    ("advertise", "*"),
    ("packing", "sometimes"),
    ("packing", None),
]

BAD_DECODE: Final[list[tuple[str, object]]] = [
    ("staging_bytes", 3 * 8 * 2**20 - 1),
    ("digest_every", -1),
    ("digest_every", 0.5),
    ("staging_slots", 0),
    ("staging_slots", 1.5),
    ("staging_slots", 4_097),
    ("proofs", None),
    ("proofs", {"process_end": True}),
    ("advertise", "tcp://x:1"),
    ("advertise", "*"),
    ("advertise", 7),
]

BAD_ENDPOINTS: Final[list[tuple[str, object]]] = [
    ("host", "*"),
    ("host", "0.0.0.0"),  # noqa: S104 - refused
    ("host", "tcp://x"),
    ("host", ""),
    ("host", None),
    ("port", 0),
    ("port", 65_536),
    ("port", "7000"),
    ("port", True),
    ("port", None),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *((make, *bad) for make in (prefill, decode) for bad in BAD),
        *((prefill, *bad) for bad in BAD_PREFILL),
        *((decode, *bad) for bad in BAD_DECODE),
        *((endpoint, *bad) for bad in BAD_ENDPOINTS),
    ],
    ids=lambda value: value.__name__ if callable(value) else ascii(value)[:40],
)
def test_what_is_wrong_is_named_with_its_value(make: Make, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert (caught.value.values["setting"], caught.value.values["value"]) == (name, value)


@pytest.mark.parametrize(
    ("settings", "message", "facts"),
    [
        ({"engine_rank": 2, "num_ranks": 2}, "engine_rank must be less than num_ranks", {"num_ranks": 2}),
        ({"engine_rank": -1}, "must be an integer in range", {"minimum": 0, "maximum": 2**32 - 1}),
        ({"staging_slot_bytes": 0}, "must be an integer in range", {"minimum": 1}),
        ({"trust": "/etc/kvflow"}, "load it with kvflow.load_trust", {"value": "/etc/kvflow"}),
        ({"instance": "x" * 300}, "within the maximum length", {"maximum": MAX_INSTANCE_CHARACTERS}),
        ({"instance": "tcp://h:1"}, "must not look like an address", {}),
    ],
)
def test_the_cure_is_told(settings: dict[str, Any], message: str, facts: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        prefill(**settings)
    assert facts.items() <= caught.value.values.items()


@pytest.mark.parametrize("bind", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://0:0", "tcp://[::]:0", "tcp://[0:0::0]:1"])
def test_wildcard_needs_a_host_to_advertise(bind: str) -> None:
    with pytest.raises(ConfigError, match="wildcard") as caught:
        prefill(bind=bind)
    assert caught.value.values == {"setting": "bind", "value": bind}
    assert prefill(bind=bind, advertise="10.0.0.1", trust=Trust.none()).bind == bind


@pytest.mark.parametrize("advertise", ["10.0.0.1", "host-1.example_net", "::1", "[::1]", "fe80::1%eth0"])
def test_host_to_advertise(advertise: str) -> None:
    assert prefill(advertise=advertise).advertise == advertise


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", None, True, 2**60], ids=repr)
def test_limits_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(**{field: value})  # type: ignore[arg-type]
    assert (caught.value.values["setting"], caught.value.values["value"]) == (f"limits.{field}", value)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Timeouts)])
@pytest.mark.parametrize("value", [0, -1, "1", None, True, float("nan"), float("inf"), 86_401], ids=repr)
def test_timeouts_are_positive_numbers_up_to_a_day(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Timeouts(**{field: value})  # type: ignore[arg-type]
    assert caught.value.values["setting"] == f"timeouts.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("process_end", None),
        ("process_end", 1),
        ("queue_pairs_die_with_process_s", 0),
        ("queue_pairs_die_with_process_s", -1.0),
        ("queue_pairs_die_with_process_s", True),
        ("queue_pairs_die_with_process_s", "60"),
        ("queue_pairs_die_with_process_s", 86_401.0),
    ],
)
def test_what_counts_as_a_proof_is_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Proofs(**cast("dict[str, Any]", {field: value}))
    assert caught.value.values["setting"] == f"proofs.{field}"
    assert decode().proofs == Proofs(process_end=True, queue_pairs_die_with_process_s=None)


def test_metadata_fits_a_message() -> None:
    assert MAX_METADATA_BYTES < MAX_MESSAGE_BYTES
    assert Limits(metadata_bytes=MAX_METADATA_BYTES).metadata_bytes == MAX_METADATA_BYTES
    with pytest.raises(ConfigError):
        Limits(metadata_bytes=MAX_METADATA_BYTES + 1)


def test_any_kind_of_integer_becomes_a_plain_one() -> None:
    config = decode(num_ranks=np.int64(4), engine_rank=np.uint8(3), staging_bytes=np.int32(0))
    assert [type(value) for value in (config.num_ranks, config.engine_rank, config.staging_bytes)] == [int] * 3
    assert (config.num_ranks, config.engine_rank, config.staging_bytes) == (4, 3, 0)
    assert type(Limits(transfers=cast(int, np.int64(3))).transfers) is int


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        prefill().num_ranks = 2  # type: ignore[misc]


def test_staging_memory_is_taken_from_the_host_only_unless_it_is_asked_for() -> None:
    assert (prefill().staging_bytes_for(is_on_host=True), decode().staging_bytes_for(is_on_host=True)) == (
        64 * 2**20,
        384 * 2**20,
    )
    for config in (prefill(), decode()):
        assert config.staging_bytes_for(is_on_host=False) == 0
    slot = {"staging_bytes": 7, "staging_slot_bytes": 7}
    for config in (prefill(**slot), decode(staging_slots=1, **slot)):
        assert (config.staging_bytes_for(is_on_host=True), config.staging_bytes_for(is_on_host=False)) == (7, 7)


@pytest.mark.parametrize("record", [None, "events", Path("events")])
def test_record(record: str | Path | None) -> None:
    assert prefill(record=record).record == record


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("p", True), ("prefill-0/é漢", True), ("", False), ("\udfff", False), (None, False), (5, False), (b"p", False)],
)
def test_name_of_an_instance(name: object, is_one: bool) -> None:
    assert is_instance_name(name) is is_one


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://10.0.0.1:7100", "10.0.0.1", 7100),
        ("tcp://host_1.example:0", "host_1.example", 0),
        ("tcp://[fd00::1]:65535", "fd00::1", 65_535),
        ("tcp://[fe80::1%enp65s0f1np1]:1", "fe80::1%enp65s0f1np1", 1),
        ("tcp://*:1", "*", 1),
        ("tcp://10.0.0.1,[fd00::1],host-1:7", "10.0.0.1,fd00::1,host-1", 7),
    ],
)
def test_address_is_taken_apart_and_put_together(address: str, host: str, port: int) -> None:
    assert split_address("registry", address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    ("bind", "host", "ports"),
    [
        ("tcp://10.0.0.1:7000-7099", "10.0.0.1", range(7_000, 7_100)),
        ("tcp://[fd00::1]:1-65535", "fd00::1", range(1, 65_536)),
        ("tcp://*:7000-7000", "*", range(7_000, 7_001)),
        ("tcp://host-1:0", "host-1", range(1)),
        ("tcp://host-1:7000", "host-1", range(7_000, 7_001)),
    ],
)
def test_ports_to_bind(bind: str, host: str, ports: range) -> None:
    assert split_bind(bind) == (host, ports)


@pytest.mark.parametrize(
    ("ports", "first", "last"),
    [("7099-7000", 7_099, 7_000), ("0-10", 0, 10), ("0-0", 0, 0), ("65000-65536", 65_000, 65_536)],
)
def test_range_of_ports_that_makes_no_sense(ports: str, first: int, last: int) -> None:
    bind = f"tcp://127.0.0.1:{ports}"
    with pytest.raises(ConfigError, match="range of ports") as caught:
        prefill(bind=bind)
    assert caught.value.values == {"setting": "bind", "value": bind, "first": first, "last": last}


@pytest.mark.parametrize("ports", ["7000-", "-7099", "7000-7099-7100", "7000:7099", "7000-7099 ", "7000-701000", "a-b"])
def test_ports_that_are_no_range(ports: str) -> None:
    with pytest.raises(ConfigError, match="must have the form") as caught:
        prefill(bind=f"tcp://127.0.0.1:{ports}")
    assert caught.value.values["value"] == f"tcp://127.0.0.1:{ports}"


def test_only_what_is_bound_has_a_range_of_ports() -> None:
    with pytest.raises(ConfigError, match="must have the form"):
        decode(registry="tcp://127.0.0.1:7000-7099")
    with pytest.raises(ConfigError, match="set trust="):
        prefill(bind="tcp://10.0.0.1:7000-7099")
    assert prefill(bind="tcp://127.0.0.1:7000-7099").bind == "tcp://127.0.0.1:7000-7099"


@pytest.mark.parametrize(
    "address", ["tcp://[::1]:7", "tcp://10.0.0.1:65535", "tcp://host-1.example:7000", "tcp://10.0.0.1,[fd00::1]:7000"]
)
def test_endpoints_are_read_from_addresses_and_written_as_such(address: str) -> None:
    assert str(Endpoint.parse(address)) == address
    host, port = split_address("address", address)
    bracketed = address.removeprefix("tcp://").rpartition(":")[0]
    assert Endpoint(host, np.int64(port)) == Endpoint(bracketed, port) == Endpoint.parse(address)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hosts", [",", "10.0.0.1,", ",10.0.0.1", "10.0.0.1, 10.0.0.2", "10.0.0.1:1,10.0.0.2", "[10.0.0.1,fd00::1]"]
)
def test_hosts_that_are_no_list(hosts: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(f"tcp://{hosts}:7000")
    with pytest.raises(ConfigError, match="must be a host"):
        prefill(bind="tcp://127.0.0.1:0", advertise=hosts)


def test_rules_see_all_hosts_of_an_address() -> None:
    several = ",".join(f"127.0.0.{number}" for number in range(1, 9))
    assert prefill(registry=f"tcp://{several}:1", advertise=several).advertise == several
    with pytest.raises(ConfigError, match="8 hosts at most"):
        prefill(registry=f"tcp://{several},127.0.0.9:1")
    with pytest.raises(ConfigError, match="must be a host"):
        prefill(advertise=f"{several},127.0.0.9")
    with pytest.raises(ConfigError, match="set trust="):
        prefill(registry="tcp://127.0.0.1,10.0.0.1:1")
    with pytest.raises(ConfigError, match="others can connect to"):
        prefill(registry="tcp://127.0.0.1,0.0.0.0:1")
    with pytest.raises(ConfigError, match="must be a host"):
        prefill(advertise="127.0.0.1,*")
    with pytest.raises(ConfigError, match="must have one host"):
        prefill(bind="tcp://127.0.0.1,127.0.0.2:0")


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7000", "tcp://host-1.example:7000", "tcp://[fd00::1]:7000"])
def test_other_hosts_are_talked_to_only_if_somebody_said_whom_to_trust(address: str) -> None:
    makers: dict[str, list[Any]] = {"bind": [prefill], "registry": [prefill, decode]}
    for setting, make in [(setting, make) for setting, found in makers.items() for make in found]:
        with pytest.raises(ConfigError, match="set trust=") as caught:
            make(**{setting: address})
        assert caught.value.values == {"setting": setting, "value": address}
        assert make(**{setting: address}, trust=Trust.none()).trust_in_force.is_plain


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7000", "tcp://127.9.9.9:0", "tcp://localhost:1", "tcp://[::1]:7"])
def test_on_the_loopback_interface_nobody_has_to(address: str) -> None:
    assert prefill(bind=address).trust_in_force.is_plain


def test_secrets_are_not_shown() -> None:
    trust = Trust("a" * 64, "b" * 64, capability_keys=(b"c" * 32,))
    assert "bbb" not in repr(prefill(trust=trust))
    assert "ccc" not in repr(trust)


def test_whole_seconds_become_floats_so_that_a_replay_sees_the_same_settings() -> None:
    timeouts = Timeouts(**{field.name: 3 for field in dataclasses.fields(Timeouts)})
    proofs = Proofs(queue_pairs_die_with_process_s=3)
    for settings in (timeouts, proofs):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=type(settings))
        assert repr(again) == repr(settings)
