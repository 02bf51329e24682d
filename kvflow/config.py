"""Settings: frozen, validated once and passed in explicitly; none is read from the environment.

Only five places read environment variables: the command line, engine adapters that have no other way to be configured,
backends, which check the variables that their libraries will read, `kvflow.admin`, which finds the directories that the
system has for sockets and for files about incidents, and `kvflow.doctor`, which reports them.

Settings are validated when they are created; errors name the setting and its value. Any integer type that works as an
index is accepted, including numpy's, and is converted to int.
"""

import ipaddress
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal, SupportsIndex, TypeGuard, get_args

from kvflow.addresses import (
    HOST,
    SCHEME,
    DirectoryURL,
    check_bind,
    check_host,
    check_needs_trust,
    check_registry,
)
from kvflow.checks import check_duration, check_integer, check_type, set_field
from kvflow.errors import ConfigError
from kvflow.trust import PLAIN, Trust

__all__ = [
    "MAX_METADATA_BYTES",
    "MAX_SLOTS_PER_PEER",
    "NUM_PRIORITIES",
    "DecodeConfig",
    "Limits",
    "Packing",
    "PrefillConfig",
    "Proofs",
    "RankConfig",
    "Timeouts",
    "check_instance_name",
    "check_num_ranks",
    "check_priority",
    "is_instance_name",
]


MAX_RANKS = 2**32
MAX_COUNT = 2**53
MAX_SLOTS_PER_PEER = 4_096

MAX_STAGING_BYTES: Final = 2**40
"""Maximum staging memory of a rank, to catch unit mistakes."""

MAX_METADATA_BYTES: Final = 16 * 2**20
"""Encoding more would hold the event loop for over 20 ms. A notice with this, digests and ranges fits a message."""

MAX_INSTANCE_CHARACTERS: Final = 256

MAX_LEASE_S: Final = 600.0
"""Maximum lease: no peer counts as alive for longer than this after its last message."""


PINGS_PER_LEASE = 3

NUM_PRIORITIES = 8
"""Number of priority classes: 0 goes first, 7 last."""

Packing = Literal["auto", "never", "always"]
"""Whether to pack small pieces (gather, send as one write, scatter): if it is faster, never, or whenever possible."""


def is_instance_name(name: object) -> TypeGuard[str]:
    """Return whether a value is a valid instance name: text that can be encoded, and not too long."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_INSTANCE_CHARACTERS:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may contain
        return False
    return True


def check_instance_name(setting: str, name: object) -> None:
    """Raise ConfigError, with the setting, unless a value is a valid instance name."""
    if not is_instance_name(name):
        raise ConfigError(
            "instance name must be a non-empty UTF-8 string within the maximum length",
            setting=setting,
            value=name,
            maximum=MAX_INSTANCE_CHARACTERS,
        )
    if name.startswith(SCHEME):
        raise ConfigError("instance name must not look like an address", setting=setting, value=name)


def check_num_ranks(value: SupportsIndex) -> int:
    """Convert an integer of any type to a number of ranks; raise ConfigError if it is none."""
    return check_integer("num_ranks", value, 1, MAX_RANKS - 1)


def check_priority(setting: str, value: SupportsIndex) -> int:
    """Convert an integer of any type to a priority class; raise ConfigError, with the setting, if it is none."""
    try:
        priority = operator.index(value)
    except TypeError:
        priority = -1
    if not 0 <= priority < NUM_PRIORITIES:
        raise ConfigError(f"priority must be an integer from 0 to {NUM_PRIORITIES - 1}", setting=setting, value=value)
    return priority


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of each phase, in seconds on a monotonic clock.

    Attributes:
        handshake_s: Time to look up an instance and complete the handshake with all of its ranks, on first contact.
        transfer_s: Time for a whole transfer as seen by the decode rank, including queueing and computing on prefill.
            An announced room may wait this long for pages, and the time starts again with the grant.
        open_s: How long a grant waits on prefill until the engine opens its room.
        grant_s: How long prefill keeps finished pages if a decode rank has neither announced the room nor asked for it,
            because it is late or died first. Starts with the last chunk, or with `RoomSender.start_lease`.
        progress_s: How long a transfer may go without progress, once the first bytes have moved, before it fails. Until
            then `transfer_s` applies.
        drain_s: How long to wait for proof that nothing can touch the pages before they are put into quarantine.
        lease_s: Silence after which a peer counts as lost if its connection is also gone; pings are sent three times
            per lease. While the connection is up, the peer may be silent for ten times as long, for example because a
            model step blocks its event loop.
    """

    handshake_s: float = 5.0
    transfer_s: float = 120.0
    open_s: float = 30.0
    grant_s: float = 30.0
    progress_s: float = 30.0
    drain_s: float = 5.0
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        for item in fields(self):
            set_field(self, item.name, check_duration(f"timeouts.{item.name}", getattr(self, item.name)))
        if self.lease_s > MAX_LEASE_S:
            raise ConfigError(
                "lease_s is too long", setting="timeouts.lease_s", value=self.lease_s, maximum=MAX_LEASE_S
            )

    @property
    def ping_s(self) -> float:
        """Seconds between two pings."""
        return self.lease_s / PINGS_PER_LEASE

    @property
    def retransmit_s(self) -> float:
        """Seconds to wait for an answer before retransmitting a message that may have been lost."""
        return self.ping_s


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits, so that no peer and no burst can take more than its share.

    Attributes:
        transfers: Maximum number of open rooms on a rank.
        peers: Maximum number of decode ranks connected to a prefill rank. One instance may take as many as it leaves to
            all others, so at most half; the same applies to the next limit.
        pending_grant_bytes: Maximum size of the page tables of grants for rooms that the prefill engine has not opened
            yet, and of those that are being received, in bytes (four for each page). A single grant may have half of
            it; decode ranks are told.
        quarantined_bytes: Size of quarantined pages at which new transfers are refused.
        metadata_bytes: Maximum size of a transfer's metadata; at most 16 MiB.
    """

    transfers: int = 16_384
    peers: int = 8_192
    pending_grant_bytes: int = 256 * 2**20
    quarantined_bytes: int = 4 * 2**30
    metadata_bytes: int = 65_536

    def __post_init__(self) -> None:
        for item in fields(self):
            maximum = MAX_METADATA_BYTES if item.name == "metadata_bytes" else MAX_COUNT
            set_field(self, item.name, check_integer(f"limits.{item.name}", getattr(self, item.name), 1, maximum))


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Settings of every rank.

    Attributes:
        instance: Name of the serving instance this rank belongs to, unique in the registry.
        engine_rank: This worker's number within its instance.
        num_ranks: Workers of the instance.
        registry: Address of the registry, e.g. "tcp://10.0.0.1:7100", URL of another directory (docs/fleets.md), or
            address of the prefill rank that acts as the registry for its instance. That prefill rank itself has a
            directory's URL or None (the instance's other ranks set it to that rank's address). Leave it None on a
            decode rank that receives only by address or ticket.
        backend: Name of the transport: "nixl", "mooncake", "memory", or one from another package.
        backend_options: Options for the transport; see its documentation.
        timeouts: How long each phase may take.
        limits: Upper bounds on what the rank holds.
        staging_bytes: Memory for packed pieces (docs/packing.md); 0 for none. It is allocated on the device if the
            pools are there and torch can use it. With None, host pools get the default if the transport reports a cost
            per descriptor (otherwise nothing would be packed), and device pools get none. The default is 384 MiB on a
            decode rank, which assigns a window of it to each prefill rank it connects to while windows last, and 64 MiB
            on a prefill rank, which gathers into it. Values smaller than one slot (prefill) or one window (decode) are
            rejected.
        staging_slot_bytes: Maximum size of a packed piece; the smaller value of the two sides applies.
        record: File to which every event of the rank is written for later replay; None for no recording.
        admin: Directory for the Unix socket over which `kvflow status` and other commands ask this rank
            (docs/operating.md): True for the default directory, False for no socket.
        black_box: Keep the last minute of events, and write them to a file when something goes wrong, for `kvflow
            incident` (docs/operating.md): True for the default directory, or a directory. Off by default, because it
            takes some percent of the rate of very small requests.
        trust: This rank's keys and the trusted keys of others (`kvflow.load_trust`). None allows plain transport on the
            loopback interface only; any other address is an error. `Trust.none()` allows plain transport everywhere.
            See docs/security.md.

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
    admin: bool | str | os.PathLike[str] = True
    black_box: bool | str | os.PathLike[str] = False
    trust: Trust | None = None

    _host_staging_bytes = 0

    def __post_init__(self) -> None:
        check_instance_name("instance", self.instance)
        set_field(self, "num_ranks", check_num_ranks(self.num_ranks))
        set_field(self, "engine_rank", check_integer("engine_rank", self.engine_rank, 0, MAX_RANKS - 1))
        if self.engine_rank >= self.num_ranks:
            raise ConfigError(
                "engine_rank must be less than num_ranks",
                setting="engine_rank",
                value=self.engine_rank,
                num_ranks=self.num_ranks,
            )
        if self.trust is not None:
            check_trust(self.trust)
        if self.registry is not None:
            check_registry("registry", self.registry, self.trust)
        check_type("backend", self.backend, str)
        if not self.backend:
            raise ConfigError("backend must be the name of a transport", setting="backend", value=self.backend)
        check_type("backend_options", self.backend_options, Mapping)
        if not all(isinstance(name, str) for name in self.backend_options):
            raise ConfigError(
                "backend_options must have string keys", setting="backend_options", value=self.backend_options
            )
        check_type("timeouts", self.timeouts, Timeouts)
        check_type("limits", self.limits, Limits)
        if self.staging_bytes is not None:
            set_field(self, "staging_bytes", check_integer("staging_bytes", self.staging_bytes, 0, MAX_STAGING_BYTES))
        slot_bytes = check_integer("staging_slot_bytes", self.staging_slot_bytes, 1, MAX_STAGING_BYTES)
        set_field(self, "staging_slot_bytes", slot_bytes)
        if self.record is not None:
            check_type("record", self.record, str, os.PathLike)
        check_type("admin", self.admin, bool, str, os.PathLike)
        check_type("black_box", self.black_box, bool, str, os.PathLike)

    @property
    def registry_endpoint(self) -> str | None:
        """The address in `registry`; None if it is a directory's URL."""
        return self.registry if self.registry is not None and self.registry.startswith(SCHEME) else None

    @property
    def directory(self) -> DirectoryURL | None:
        """The URL in `registry`; None if it is an address."""
        is_url = self.registry is not None and self.registry_endpoint is None
        return DirectoryURL.parse("registry", str(self.registry)) if is_url else None

    @property
    def trust_in_force(self) -> Trust:
        """The effective keys; plain transport if none are configured."""
        return self.trust or PLAIN

    def _check_staging(self, minimum: int) -> None:
        """Raise ConfigError if there is staging memory, but too little to be used."""
        if self.staging_bytes and self.staging_bytes < minimum:
            raise ConfigError(
                "staging_bytes must be 0, or enough for one slot (prefill) or one window (decode)",
                setting="staging_bytes",
                value=self.staging_bytes,
                minimum=minimum,
            )

    def staging_bytes_for(self, *, is_on_host: bool) -> int:
        """Return how many bytes of staging memory a rank allocates, whose pools are in host memory or not."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        return self._host_staging_bytes if is_on_host else 0


def check_trust(trust: object) -> None:
    """Raise ConfigError unless a value is a `Trust`, such as for the directory to load one from."""
    if not isinstance(trust, Trust):
        raise ConfigError(
            "trust must be a kvflow.Trust; load it with kvflow.load_trust(directory)", setting="trust", value=trust
        )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(RankConfig):
    """Settings of a prefill rank.

    Attributes:
        bind: Address of its control socket. Port 0 takes a free one, and "tcp://10.0.0.2:7000-7099" the first free one
            of a range.
        advertise: Host at which decode ranks reach it; needed if `bind` is a wildcard. If it is several hosts
            ("10.0.0.2,10.1.0.2"), or a name with several addresses, each is tried in turn. A name may lead to another
            host later. Mooncake moves data over the first.
        packing: "auto" packs where the transport's figures say it is faster, "always" whenever a slot is available,
            "never" not at all.
        takes_offers: The engine looks at the offers of other instances (`PrefillRank.offers`), which are declined
            otherwise.
    """

    packing: Packing = "auto"
    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    takes_offers: bool = False

    _host_staging_bytes = 64 * 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_staging(self.staging_slot_bytes)
        check_bind(self.bind, self.advertise)
        if self.engine_rank and self.directory is not None:
            raise ConfigError(
                "only engine rank 0 is listed in a directory: set registry to its address",
                setting="registry",
                value=self.registry,
                engine_rank=self.engine_rank,
            )
        check_needs_trust("bind", self.bind, self.trust)
        check_type("takes_offers", self.takes_offers, bool)
        if self.packing not in get_args(Packing):
            raise ConfigError(
                "unknown packing mode", setting="packing", value=self.packing, known=list(get_args(Packing))
            )


@dataclass(frozen=True, kw_only=True)
class Proofs:
    """What a decode rank accepts as proof that a prefill rank can no longer write, besides that rank's own messages.

    docs/failure-model.md lists what always counts: all bytes have arrived, Drained, a Goodbye that is a fence, and an
    operator's `release`. Over TCP, time proves nothing, however long ago a process has ended.

    Attributes:
        process_end: Accept the end of the process as proof, if the transport knows that nothing can land afterwards or
            has seen the last bytes land.
        queue_pairs_die_with_process_s: Set this only if all prefill ranks write over RDMA: seconds after the end of a
            process by which your fabric has certainly delivered its last byte. Accepted only with a transport that may
            use RDMA queue pairs.

    Raises:
        ConfigError: A setting has the wrong type or is out of range; `values` has its name and its value.
    """

    process_end: bool = True
    queue_pairs_die_with_process_s: float | None = None

    def __post_init__(self) -> None:
        check_type("proofs.process_end", self.process_end, bool)
        if self.queue_pairs_die_with_process_s is not None:
            value = check_duration("proofs.queue_pairs_die_with_process_s", self.queue_pairs_die_with_process_s)
            set_field(self, "queue_pairs_die_with_process_s", value)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(RankConfig):
    """Settings of a decode rank. A decode rank opens no port; it only connects.

    Attributes:
        signed_tickets: Accept only tickets that are signed by a ticket key in `trust`. By default, if `trust` has keys.
        allowed_hosts: Networks ("10.2.0.0/16"), addresses and host names ("*.prefill.svc", "prefill-0") that this rank
            may connect to because a ticket, a request or a directory says so. By default, any.
        advertise: Host at which the prefill ranks' transports reach this rank. By default, this host's address on the
            route to the registry, or on the default route if there is no registry.
        digest_every: Compare digests of sent and received data in every n-th transfer: 1 for all, 0 for none. Needs
            host memory on both sides, and both sides read the transfer's pages once more.
        staging_slots: Number of slots in each prefill rank's window.
        proofs: What counts as proof that a prefill process can no longer write.
    """

    staging_slots: int = 3
    digest_every: int = 0
    advertise: str | None = None
    proofs: Proofs = Proofs()
    signed_tickets: bool | None = None
    allowed_hosts: Sequence[str] = ()

    _host_staging_bytes = 384 * 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("proofs", self.proofs, Proofs)
        if self.signed_tickets is not None:
            check_type("signed_tickets", self.signed_tickets, bool)
        if self.signed_tickets and not self.trust_in_force.ticket_keys:
            raise ConfigError("signed_tickets needs a ticket key in trust", setting="signed_tickets", value=True)
        check_type("allowed_hosts", self.allowed_hosts, tuple, list)
        set_field(self, "allowed_hosts", tuple(self.allowed_hosts))
        for rule in self.allowed_hosts:
            _check_host_rule(rule)
        if self.advertise is not None:
            check_host("advertise", self.advertise)
        set_field(self, "digest_every", check_integer("digest_every", self.digest_every, 0, MAX_COUNT))
        set_field(self, "staging_slots", check_integer("staging_slots", self.staging_slots, 1, MAX_SLOTS_PER_PEER))
        self._check_staging(self.staging_slots * self.staging_slot_bytes)

    @property
    def needs_signed_tickets(self) -> bool:
        """Whether an unsigned ticket is rejected."""
        return not self.trust_in_force.is_plain if self.signed_tickets is None else self.signed_tickets


def _check_host_rule(rule: object) -> None:
    """Raise ConfigError unless an item of `allowed_hosts` is a network, an address or a host name."""
    check_type("allowed_hosts", rule, str)
    name = str(rule).removeprefix("*.")
    try:
        ipaddress.ip_network(str(rule))
    except ValueError as error:
        if not HOST.fullmatch(name) or name.rpartition(".")[2].isdigit():  # such as an incomplete address
            raise ConfigError(
                "must be a network (10.2.0.0/16), an address or a host name (*.prefill.svc)",
                setting="allowed_hosts",
                value=rule,
            ) from error
