"""Settings: frozen, checked once, passed in; none comes from the environment.

Only the command line reads that, and backends, which look at what the libraries they load will read from it.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, SupportsIndex, get_args

from kvflow.errors import ConfigError

__all__ = [
    "MAX_SLOTS_PER_PEER",
    "NUM_PRIORITIES",
    "DecodeConfig",
    "Limits",
    "Packing",
    "PrefillConfig",
    "RankConfig",
    "Timeouts",
    "check_address",
    "check_count",
    "check_duration",
    "check_priority",
]


MAX_PORT = 65_535
MAX_DURATION_S = 86_400.0
MAX_RANKS = 2**32
MAX_COUNT = 2**53
MAX_SLOTS_PER_PEER = 4_096

PINGS_PER_LEASE = 3

NUM_PRIORITIES = 8
"""Classes of transfers: 0 goes first, 7 last."""

Packing = Literal["auto", "never", "always"]
"""Whether small pieces are gathered, moved in one piece, and scattered: when it pays off, never, or wherever it can."""

WILDCARDS = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]")


def check_address(setting: str, address: str) -> None:
    """Refuse what is not `tcp://host:port`; ZMQ itself takes ports beyond 65535 and uses others instead.

    Raises:
        ConfigError: Naming the setting.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not (port.isdecimal() and int(port) <= MAX_PORT):
        raise ConfigError("address must look like tcp://host:port", setting=setting, value=address)


def check_count(setting: str, value: SupportsIndex) -> int:
    """Turn any kind of integer into a number of ranks.

    Raises:
        ConfigError: Naming the setting.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if not 1 <= count < MAX_RANKS:
        raise ConfigError("setting must be a positive integer", setting=setting, value=value)
    return count


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
    _check_positive(setting, value, MAX_DURATION_S)


def _check_positive(setting: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigError("setting must be a positive number", setting=setting, value=value, most=most)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each phase may take, in seconds on a monotonic clock.

    Attributes:
        handshake_s: Finding an instance and shaking hands with all of its ranks, on first contact.
        transfer_s: A whole transfer as the decode rank sees it, queueing and computing on prefill included.
        open_s: How long a grant waits on prefill for an engine that has not opened its room.
        grant_s: How long finished pages wait on prefill for a decode rank that has not asked for them, because it is
            late or because it died before it could.
        first_bytes_s: How long a granted transfer may wait, queueing and computing on prefill included, until its first
            bytes have arrived.
        progress_s: How long nothing may arrive or leave, once something has, before a transfer is given up.
        drain_s: How long to wait for the proof that pages are quiet before they are put into quarantine.
        ageing_s: How long a chunk waits for its turn until it is lifted by one class of priority. A class is worth this
            much of a head start over the next one: 0.1 s lets the lowest of 8 wait for 0.7 s before it takes turns with
            the highest.
        lease_s: Silence after which a peer is taken for lost; pings go out three times as often. An event loop that is
            blocked for longer (by a model step, say) is taken for dead.
    """

    handshake_s: float = 5.0
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
            check_duration(item.name, getattr(self, item.name))

    @property
    def ping_s(self) -> float:
        """Between two signs of life."""
        return self.lease_s / PINGS_PER_LEASE

    @property
    def repeat_s(self) -> float:
        """How long to wait for an answer before a message that may have been lost is said again."""
        return self.ping_s


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds, so that no peer and no burst can take more than its share.

    Attributes:
        transfers: Rooms open at once on a rank.
        pending_grants: Grants kept for rooms that the prefill engine has not opened yet.
        queued_chunks: Pieces of granted chunks that wait for one peer, for their data, turn or credit; beyond it
            `chunk()` waits for rooms that go to that peer, and for no others. A chunk comes in with all of its pieces,
            or not at all.
        bytes_per_post: Size above which a chunk is cut into pieces, each a write of its own. Cuts fall between pages,
            so a single page that is larger, over all layers, still goes.
        bytes_per_layer_piece: Bytes up to which layers that get ready apart are joined into one piece; more make pieces
            of their own, so that the first layers are on their way while the others are computed.
        posts_per_peer: Writes posted to one peer and not yet ended.
        bytes_per_peer: Bytes of such writes; a single larger piece still goes, alone.
        rows_per_peer: Descriptors of such writes, counted before they are planned: as many as there can be; as above.
        quarantined_pages: Pages in quarantine beyond which nothing new is admitted.
        quarantined_bytes: Bytes of such pages, as above.
        metadata_bytes: Metadata of one transfer.
        rows_planned_inline: Descriptors above which planning leaves the event loop for a worker thread.
    """

    transfers: int = 16_384
    pending_grants: int = 16_384
    queued_chunks: int = 1_024
    bytes_per_post: int = 64 * 2**20
    bytes_per_layer_piece: int = 4 * 2**20
    posts_per_peer: int = 16
    bytes_per_peer: int = 128 * 2**20
    rows_per_peer: int = 2**21
    quarantined_pages: int = 65_536
    quarantined_bytes: int = 4 * 2**30
    metadata_bytes: int = 65_536
    rows_planned_inline: int = 20_000

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_positive(item.name, getattr(self, item.name), MAX_COUNT)


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What every rank needs to know.

    Attributes:
        instance: Name of the serving instance this rank belongs to, unique in the registry.
        engine_rank: This worker's number within its instance.
        num_ranks: Workers of the instance.
        registry: ZMQ address of the registry, e.g. "tcp://10.0.0.1:7100".
        backend: Transport by name: "nixl", "mooncake", "memory", or one that another distribution brings.
        backend_options: Passed to the backend, see its class.
        timeouts: How long things may take.
        limits: How much there may be of things.
        staging_bytes: Memory for packed pieces (docs/packing.md); 0 for none. It is taken from the device if the pools
            are there and torch can use it. A decode rank gives a window of it to each prefill rank that it greets, for
            as long as there are any; a prefill rank gathers into it.
        staging_slot_bytes: Most bytes that are packed at once; the smaller value of the two sides counts.
    """

    instance: str
    engine_rank: int = 0
    num_ranks: int = 1
    registry: str
    backend: str = "nixl"
    backend_options: Mapping[str, object] = field(default_factory=dict)
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    staging_bytes: int = 0
    staging_slot_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        if self.staging_bytes != 0:
            _check_positive("staging_bytes", self.staging_bytes, MAX_COUNT)
        _check_positive("staging_slot_bytes", self.staging_slot_bytes, MAX_COUNT)
        if not self.instance:
            raise ConfigError("instance needs a name", instance=self.instance)
        if not 0 <= self.engine_rank < self.num_ranks < MAX_RANKS:
            raise ConfigError("engine rank is out of range", engine_rank=self.engine_rank, num_ranks=self.num_ranks)
        check_address("registry", self.registry)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(RankConfig):
    """Settings of a prefill rank.

    Attributes:
        bind: Address of its control socket; port 0 takes a free one.
        advertise: Host under which decode ranks reach it; needed if `bind` is a wildcard.
        packing: "auto" packs where that is quicker by the transport's own figures, "always" wherever there is a slot,
            "never" not at all.
    """

    staging_bytes: int = 64 * 2**20
    packing: Packing = "auto"

    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("bind", self.bind)
        if self.advertise is None and self.bind.startswith(WILDCARDS):
            raise ConfigError("a wildcard address needs a host to advertise", bind=self.bind)
        if self.packing not in get_args(Packing):
            raise ConfigError("unknown way of packing", packing=self.packing, known=list(get_args(Packing)))


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(RankConfig):
    """Settings of a decode rank. It opens no port, it only connects.

    Attributes:
        digest_every: Of how many transfers one is compared, byte for byte, with what was sent: 1 compares each of
            them, 0 none. Needs host memory on both sides. Both sides read all of its pages once more.
        staging_slots: Slots of the window of one prefill rank.
    """

    staging_bytes: int = 384 * 2**20
    staging_slots: int = 3

    digest_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.digest_every != 0:
            check_count("digest_every", self.digest_every)
        _check_positive("staging_slots", self.staging_slots, MAX_SLOTS_PER_PEER)
