"""Settings: frozen, checked once, passed in; none comes from the environment.

Only the command line reads that, adapters of engines that have no other way to be told, and backends, which look at
what the libraries they load will read from it.

Every setting is checked when it is made, and what is wrong is named with its value. Integers of any kind that can be an
index are taken, numpy's among them, and become plain ones.
"""

import ipaddress
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, SupportsIndex, get_args

from kvflow.errors import ConfigError
from kvflow.trust import PLAIN, Trust

__all__ = [
    "MAX_METADATA_BYTES",
    "MAX_SLOTS_PER_PEER",
    "NUM_PRIORITIES",
    "DecodeConfig",
    "Endpoint",
    "Limits",
    "Packing",
    "PrefillConfig",
    "Proofs",
    "RankConfig",
    "Timeouts",
    "check_address",
    "check_argument",
    "check_bind",
    "check_duration",
    "check_endpoint",
    "check_host",
    "check_instance_name",
    "check_num_ranks",
    "check_priority",
    "check_reach",
    "check_type",
    "is_instance_name",
    "join_address",
    "split_address",
]


MAX_PORT = 65_535
MAX_DURATION_S = 86_400.0
MAX_RANKS = 2**32
MAX_COUNT = 2**53
MAX_SLOTS_PER_PEER = 4_096

MAX_STAGING_BYTES: Final = 2**40
"""Catches a mistake in the unit; nobody stages a tebibyte."""

MAX_METADATA_BYTES: Final = 32 * 2**20
"""Half of what a message may take, so that a notice with digests and ranges always fits."""

MAX_INSTANCE_CHARACTERS: Final = 256

MAX_LEASE_S: Final = 600.0
"""Nobody is taken for alive for longer than this after he was last heard."""


PINGS_PER_LEASE = 3

NUM_PRIORITIES = 8
"""Classes of transfers: 0 goes first, 7 last."""

Packing = Literal["auto", "never", "always"]
"""Whether small pieces are gathered, moved in one piece, and scattered: when it pays off, never, or wherever it can."""

MAX_ZONE: Final = 15
"""Letters in the zone of an IPv6 address: the name of a network interface has no more. Python resolves none beyond 63,
and says so with an error that is not one of the network."""

ADDRESS: Final = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[A-Za-z0-9:._%-]+\]):([0-9]{1,5})", re.ASCII)
HOST: Final = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


def split_address(setting: str, address: object) -> tuple[str, int]:
    """Take `tcp://host:port` apart; ZMQ itself takes ports beyond 65535 and uses others instead.

    Returns:
        The host, an IPv6 address without brackets; the port.

    Raises:
        ConfigError: It does not look like that. Names the setting.
    """
    match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or int(match[2]) > MAX_PORT:
        raise ConfigError("address must look like tcp://host:port", setting=setting, value=address)
    host = match[1]
    if host.startswith("["):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise ConfigError("only an IPv6 address stands in brackets", setting=setting, value=address)
    return host, int(match[2])


def join_address(host: str, port: int) -> str:
    """Give `tcp://host:port`; an IPv6 address gets its brackets if it has none."""
    is_bare = ":" in host and not host.startswith("[")
    return f"tcp://[{host}]:{port}" if is_bare else f"tcp://{host}:{port}"


def check_address(setting: str, address: object) -> None:
    """Refuse what is not `tcp://host:port`.

    Raises:
        ConfigError: Naming the setting.
    """
    split_address(setting, address)


def check_endpoint(setting: str, address: object) -> None:
    """Refuse an address that nobody can connect to: a wildcard, or port 0.

    Raises:
        ConfigError: It is malformed, or such an address. Names the setting.
    """
    host, port = split_address(setting, address)
    if port == 0 or _is_wildcard(host):
        raise ConfigError("address must name a host and a port to connect to", setting=setting, value=address)


def check_reach(setting: str, address: str, trust: Trust | None) -> None:
    """Refuse an address beyond this host if nobody has said whom to trust there.

    Args:
        setting: For the error.
        address: "tcp://host:port".
        trust: None if nobody has.

    Raises:
        ConfigError: The address is malformed, or others may be there. Names the setting, and what to do.
    """
    host, _ = split_address(setting, address)
    if trust is None and not _is_loopback(host):
        raise ConfigError(
            "other hosts reach this address: say whom to trust by trust=kvflow.load_trust(directory), or ask for plain "
            "transport by trust=kvflow.Trust.none()",
            setting=setting,
            value=address,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Endpoint:
    """Where a prefill rank listens that answers for its instance.

    Attributes:
        host: A name, or an IPv4 or IPv6 address, with or without brackets.
        port: Of its control socket.

    Raises:
        ConfigError: Nobody can connect there.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        check_host("host", self.host)
        _set(self, "host", self.host.strip("[]"))
        _set(self, "port", _check_integer("port", self.port, 1, MAX_PORT))

    def __str__(self) -> str:
        return join_address(self.host, self.port)

    @classmethod
    def parse(cls, address: str) -> "Endpoint":
        """Make one of "tcp://host:port", which is what `PrefillRank.endpoint` gives.

        Raises:
            ConfigError: It does not look like that, or nobody can connect there.
        """
        check_endpoint("address", address)
        return cls(*split_address("address", address))


def check_bind(bind: object, advertise: object) -> None:
    """Refuse an address that cannot be served, or that others could not reach.

    Args:
        bind: "tcp://host:port".
        advertise: Host to give to others, without a port; the one of `bind` if None.

    Raises:
        ConfigError: One of them is malformed, or `bind` is a wildcard and `advertise` is missing.
    """
    host, _ = split_address("bind", bind)
    if advertise is None:
        if _is_wildcard(host):
            raise ConfigError("a wildcard address needs a host to advertise", setting="bind", value=bind)
    else:
        check_host("advertise", advertise)


def check_host(setting: str, host: object) -> None:
    """Refuse what is no host that others can connect to.

    Raises:
        ConfigError: It is a wildcard, or has a scheme or a port, or is none at all. Names the setting.
    """
    if not isinstance(host, str) or not _is_host(host) or _is_wildcard(host.strip("[]")):
        raise ConfigError("setting must be a host, without scheme and port", setting=setting, value=host)


def _is_ipv6(host: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(host).scope_id
    except ValueError:
        return False
    return zone is None or len(zone) <= MAX_ZONE


def _is_host(text: str) -> bool:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return _is_ipv6(bare) or (bare == text and HOST.fullmatch(text) is not None)


def _is_wildcard(host: str) -> bool:
    """Say whether it stands for every address of the host; "0" and "0x0.0" do, too."""
    if _is_ipv6(host):
        address = ipaddress.IPv6Address(host)
        return (address.ipv4_mapped or address).is_unspecified
    return host == "*" or not host.strip("0.xX")


def is_instance_name(name: object) -> bool:
    """Say whether something can be the name of an instance: text that can travel, and not too long of it."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_INSTANCE_CHARACTERS:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may contain
        return False
    return True


def check_instance_name(setting: str, name: object) -> None:
    """Refuse what cannot be the name of an instance.

    Raises:
        ConfigError: Naming the setting.
    """
    if not is_instance_name(name):
        raise ConfigError(
            "instance must be UTF-8 text, neither empty nor too long",
            setting=setting,
            value=name,
            most=MAX_INSTANCE_CHARACTERS,
        )


def check_num_ranks(value: SupportsIndex) -> int:
    """Turn any kind of integer into a number of ranks.

    Raises:
        ConfigError: It is none, or out of range.
    """
    return _check_integer("num_ranks", value, 1, MAX_RANKS - 1)


def check_priority(setting: str, value: SupportsIndex) -> int:
    """Turn any kind of integer into a class of transfers.

    Raises:
        ConfigError: Naming the setting.
    """
    try:
        priority = operator.index(value)
    except TypeError:
        priority = -1
    if not 0 <= priority < NUM_PRIORITIES:
        raise ConfigError("priority must be an integer in range", setting=setting, value=value, end=NUM_PRIORITIES)
    return priority


def check_duration(setting: str, value: object) -> None:
    """Refuse what is not a positive number of seconds up to a day, which is what messages can carry.

    Raises:
        ConfigError: Naming the setting.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_DURATION_S:
        raise ConfigError("setting must be a positive number", setting=setting, value=value, most=MAX_DURATION_S)


def _check_integer(setting: str, value: object, least: int, most: int) -> int:
    """Turn any kind of integer within bounds into a plain one; a bool is none.

    Raises:
        ConfigError: Naming the setting.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        kind = "setting must be a positive integer" if least else "setting must be an integer that is not negative"
        raise ConfigError(kind, setting=setting, value=value, most=most)
    return number


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each phase may take, in seconds on a monotonic clock.

    Attributes:
        handshake_s: Finding an instance and shaking hands with all of its ranks, on first contact.
        announced_s: How long a decode rank may keep a room announced without granting pages for it.
        transfer_s: A whole transfer as the decode rank sees it, queueing and computing on prefill included. That of an
            announced one begins with its grant.
        open_s: How long a grant waits on prefill for an engine that has not opened its room.
        grant_s: How long finished pages wait on prefill for a decode rank that has neither announced the room nor asked
            for them, because it is late or because it died before it could.
        first_bytes_s: How long a granted transfer may wait, queueing and computing on prefill included, until its first
            bytes have arrived.
        progress_s: How long nothing may arrive or leave, once something has, before a transfer is given up.
        drain_s: How long to wait for the proof that pages are quiet before they are put into quarantine.
        ageing_s: How long a chunk waits for its turn until it is lifted by one class of priority. A class is worth this
            much of a head start over the next one: 0.1 s lets the lowest of 8 wait for 0.7 s before it takes turns with
            the highest.
        lease_s: Silence after which a peer is taken for lost, if its connection is gone, too; pings go out three times
            as often. While its connection stands, an event loop may be blocked (by a model step, say) for ten times as
            long.
    """

    handshake_s: float = 5.0
    announced_s: float = 600.0
    transfer_s: float = 120.0
    open_s: float = 30.0
    grant_s: float = 30.0
    first_bytes_s: float = 120.0
    progress_s: float = 30.0
    drain_s: float = 5.0
    ageing_s: float = 0.1
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        for item in fields(self):
            check_duration(f"timeouts.{item.name}", getattr(self, item.name))
        if self.lease_s > MAX_LEASE_S:
            raise ConfigError("lease is too long", setting="timeouts.lease_s", value=self.lease_s, most=MAX_LEASE_S)

    @property
    def ping_s(self) -> float:
        """Seconds between two pings."""
        return self.lease_s / PINGS_PER_LEASE

    @property
    def retransmit_s(self) -> float:
        """How long to wait for an answer before a message that may have been lost is retransmitted."""
        return self.ping_s


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds, so that no peer and no burst can take more than its share.

    Attributes:
        transfers: Rooms open at once on a rank.
        peers: Decode ranks that a prefill rank is connected to. One instance has at most as many as are left for all
            others; so it is with the next two.
        pending_grants: Grants and announcements kept for rooms that the prefill engine has not opened yet.
        pending_grant_bytes: Bytes of the page tables of such grants.
        queued_chunks: Pieces of granted chunks that wait for one peer, for their data, turn or credit; beyond it
            `chunk()` waits for rooms that go to that peer, and for no others. A chunk comes in with all of its pieces,
            or not at all.
        bytes_per_post: Size above which a chunk is split into pieces, each a write of its own. Splits fall between
            pages, so a single page that is larger, over all layers, is still sent.
        bytes_per_layer_piece: Bytes up to which layers that get ready apart are joined into one piece; more make pieces
            of their own, so that the first layers are on their way while the others are computed.
        posts_per_peer: Writes posted to one peer and not yet ended.
        bytes_per_peer: Bytes of such writes; a single larger piece is still sent, alone.
        descriptors_per_peer: Most descriptors that such writes can have, counted before they are planned; as
            above.
        quarantined_pages: Pages in quarantine beyond which nothing new is admitted.
        quarantined_bytes: Bytes of such pages, as above.
        unfenced: Ended transfers of a prefill rank of which bytes may still land at a decode rank. Beyond it, those to
            decode ranks that are gone are not followed any more: such a rank must restart before it is served again.
            If all are connected, nothing new is admitted. One decode rank that has an eighth of them is refused.
        metadata_bytes: Metadata of one transfer, at most 32 MiB.
        descriptors_planned_inline: Descriptors above which planning leaves the event loop for a worker thread.
    """

    transfers: int = 16_384
    peers: int = 8_192
    pending_grants: int = 16_384
    pending_grant_bytes: int = 256 * 2**20
    queued_chunks: int = 1_024
    bytes_per_post: int = 64 * 2**20
    bytes_per_layer_piece: int = 4 * 2**20
    posts_per_peer: int = 16
    bytes_per_peer: int = 128 * 2**20
    descriptors_per_peer: int = 2**21
    quarantined_pages: int = 65_536
    quarantined_bytes: int = 4 * 2**30
    unfenced: int = 16_384
    metadata_bytes: int = 65_536
    descriptors_planned_inline: int = 20_000

    def __post_init__(self) -> None:
        for item in fields(self):
            most = MAX_METADATA_BYTES if item.name == "metadata_bytes" else MAX_COUNT
            _set(self, item.name, _check_integer(f"limits.{item.name}", getattr(self, item.name), 1, most))


def _set(config: object, name: str, value: object) -> None:
    """Put a setting in its plain form, while a frozen object is made."""
    object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What every rank needs to know.

    Attributes:
        instance: Name of the serving instance this rank belongs to, unique in the registry.
        engine_rank: This worker's number within its instance.
        num_ranks: Workers of the instance.
        registry: ZMQ address of the registry, e.g. "tcp://10.0.0.1:7100", or of a prefill rank that answers for its
            instance. None for a prefill rank that answers for its instance itself; its siblings give its address. None
            for a decode rank that needs no names: it receives by address or ticket.
        backend: Transport by name: "nixl", "mooncake", "memory", or one that another distribution brings.
        backend_options: Passed to the backend, see its class.
        timeouts: How long each phase may take.
        limits: Upper bounds on what the rank holds.
        staging_bytes: Memory for packed pieces (docs/packing.md); 0 for none. It is taken from the device if the pools
            are there and torch can use it. None takes some if the pools are in host memory and the transport says
            what a descriptor costs (else nothing would be packed), and none from a device:
            384 MiB on a decode rank, which gives a window of it to each prefill rank that it connects to, for as long
            as there are any; 64 MiB on a prefill rank, which gathers into it.
            Less than a slot on prefill, or than a window on decode, is refused.
        staging_slot_bytes: Most bytes that are packed at once; the smaller value of the two sides counts.
        record: File to which every event of the rank is written, to be replayed; nothing is written if None.
        trust: Own keys, and those of others (`kvflow.load_trust`). None for plain transport on the loopback interface
            and an error everywhere else; `Trust.none()` for plain transport everywhere. See docs/security.md.

    Raises:
        ConfigError: A setting has the wrong type or is out of range; `values` has its name and its value.
    """

    instance: str
    engine_rank: int = 0
    num_ranks: int = 1
    registry: str | None = None
    backend: str = "nixl"
    backend_options: Mapping[str, object] = field(default_factory=dict)
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    staging_bytes: int | None = None
    staging_slot_bytes: int = 8 * 2**20
    record: str | os.PathLike[str] | None = None
    trust: Trust | None = None

    def __post_init__(self) -> None:
        check_instance_name("instance", self.instance)
        _set(self, "num_ranks", check_num_ranks(self.num_ranks))
        _set(self, "engine_rank", _check_integer("engine_rank", self.engine_rank, 0, self.num_ranks - 1))
        if self.trust is not None:
            check_type("trust", self.trust, Trust)
        if self.registry is not None:
            check_endpoint("registry", self.registry)
            check_reach("registry", self.registry, self.trust)
        check_type("backend", self.backend, str)
        if not self.backend:
            raise ConfigError("backend must be the name of a transport", setting="backend", value=self.backend)
        check_type("backend_options", self.backend_options, Mapping)
        if not all(isinstance(name, str) for name in self.backend_options):
            raise ConfigError("options must have names", setting="backend_options", value=self.backend_options)
        check_type("timeouts", self.timeouts, Timeouts)
        check_type("limits", self.limits, Limits)
        if self.staging_bytes is not None:
            _set(self, "staging_bytes", _check_integer("staging_bytes", self.staging_bytes, 0, MAX_STAGING_BYTES))
        slot_bytes = _check_integer("staging_slot_bytes", self.staging_slot_bytes, 1, MAX_STAGING_BYTES)
        _set(self, "staging_slot_bytes", slot_bytes)
        if self.record is not None:
            check_type("record", self.record, str, os.PathLike)

    @property
    def trust_in_force(self) -> Trust:
        """The keys to go by; plain transport if nothing was said."""
        return self.trust or PLAIN

    def _check_staging(self, least: int) -> None:
        """Refuse staging memory of which nothing could be used.

        Raises:
            ConfigError: There is some, but less than that.
        """
        if self.staging_bytes and self.staging_bytes < least:
            raise ConfigError(
                "staging memory must be 0, or hold at least one slot on prefill and one window on decode",
                setting="staging_bytes",
                value=self.staging_bytes,
                least=least,
            )

    def staging_bytes_for(self, *, is_on_host: bool) -> int:
        """Bytes of staging memory that a rank takes.

        Args:
            is_on_host: The pools are in host memory.
        """
        if self.staging_bytes is not None:
            return self.staging_bytes
        return self._host_staging_bytes if is_on_host else 0

    @property
    def _host_staging_bytes(self) -> int:
        return 0


def check_type(setting: str, value: object, *kinds: type) -> None:
    """Refuse a value of another type.

    Raises:
        ConfigError: Naming the setting.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError("setting has the wrong type", setting=setting, value=value, wanted=wanted)


def check_argument(argument: str, value: object, kind: type) -> None:
    """Refuse an argument of another type. Its value is not shown: a layout, or the tensors that were meant for it.

    Raises:
        ConfigError: Naming the argument, and both types.
    """
    if not isinstance(value, kind):
        found, wanted = type(value).__name__, kind.__name__
        raise ConfigError("argument has the wrong type", argument=argument, found=found, wanted=wanted)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(RankConfig):
    """Settings of a prefill rank.

    Attributes:
        bind: Address of its control socket; port 0 takes a free one.
        advertise: Host under which decode ranks reach it; needed if `bind` is a wildcard.
        packing: "auto" packs where that is quicker by the transport's own figures, "always" wherever there is a slot,
            "never" not at all.
    """

    packing: Packing = "auto"

    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_staging(self.staging_slot_bytes)
        check_bind(self.bind, self.advertise)
        check_reach("bind", self.bind, self.trust)
        if self.packing not in get_args(Packing):
            raise ConfigError(
                "unknown packing mode", setting="packing", value=self.packing, known=list(get_args(Packing))
            )

    @property
    def _host_staging_bytes(self) -> int:
        return 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Proofs:
    """What proves to a decode rank, besides what a prefill rank says itself, that this can write nothing any more.

    What always counts is in docs/failure-model.md: all bytes have arrived, Drained, a Goodbye that is a fence, and an
    operator's `release`. Over TCP, time proves nothing, however long ago a process has ended.

    Attributes:
        process_end: The end of its process counts, where the transport has found out that nothing can land after it,
            or when the last bytes have landed.
        queue_pairs_die_with_process_s: The word of the deployment that each prefill rank writes over queue pairs of
            RDMA, and that its fabric delivers nothing any more so many seconds after their process has ended; None if
            it does not say so. It is only taken with a transport that may use such queue pairs.

    Raises:
        ConfigError: A setting has the wrong type or is out of range; `values` has its name and its value.
    """

    process_end: bool = True
    queue_pairs_die_with_process_s: float | None = None

    def __post_init__(self) -> None:
        check_type("proofs.process_end", self.process_end, bool)
        if self.queue_pairs_die_with_process_s is not None:
            check_duration("proofs.queue_pairs_die_with_process_s", self.queue_pairs_die_with_process_s)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(RankConfig):
    """Settings of a decode rank. It opens no port, it only connects.

    Attributes:
        advertise: Host under which transports of prefill ranks reach this one. By default the address of this host on
            the network that leads to the registry, or to the default route if there is no registry.
        digest_every: Compare the digests of what was sent and what has arrived in one of so many transfers: 1 for each
            transfer, 0 for none. Needs host memory on both sides. Both sides read all of its pages once more.
        staging_slots: Slots of the window of one prefill rank.
        proofs: What proves that a prefill process can write nothing any more.
    """

    staging_slots: int = 3

    digest_every: int = 0

    advertise: str | None = None

    proofs: Proofs = Proofs()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("proofs", self.proofs, Proofs)
        if self.advertise is not None:
            check_host("advertise", self.advertise)
        _set(self, "digest_every", _check_integer("digest_every", self.digest_every, 0, MAX_COUNT))
        _set(self, "staging_slots", _check_integer("staging_slots", self.staging_slots, 1, MAX_SLOTS_PER_PEER))
        self._check_staging(self.staging_slots * self.staging_slot_bytes)

    @property
    def _host_staging_bytes(self) -> int:
        return 384 * 2**20
