"""Messages between ranks and directories: where ranks are."""

from typing import Annotated, Final

import msgspec

from kvflow.addresses import check_endpoint
from kvflow.errors import ConfigError, RemoteProtocolError
from kvflow.geometry.layout import KVLayout, Name
from kvflow.wire.messages.values import MAX_RANKS_TOLD, InstanceName, Lease, LookupNumber, LookupTime, Message, PeerId

__all__ = [
    "EVERY_INSTANCE",
    "MAX_LISTED",
    "Lookup",
    "RankAddress",
    "RankRecord",
    "Records",
    "Register",
    "Registered",
    "RegistrationConflict",
    "SealedRecord",
    "SealedRecords",
    "SealedRegister",
    "Unregister",
]


EVERY_INSTANCE: Final = "*"
"""Asks a registry for all of its ranks, for a person."""

MAX_LISTED: Final = 1_024
"""Maximum number of ranks in the answer, which holds the event loop for a few ms."""


def _check_endpoint(endpoint: str) -> None:
    try:
        check_endpoint("endpoint", endpoint)
    except ConfigError as error:
        raise RemoteProtocolError("record has no usable endpoint", endpoint=endpoint) from error


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a rank.

    Attributes:
        peer: The rank's current incarnation.
        num_ranks: Number of ranks in the instance, which is complete when all of them are registered.
        backend: Name of its transport.

    Raises:
        RemoteProtocolError: The engine rank is not below `num_ranks`, or the endpoint is not a TCP address.
    """

    peer: PeerId
    num_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    backend: Name

    def __post_init__(self) -> None:
        engine_rank = self.peer.rank.engine_rank
        if not 0 <= engine_rank < self.num_ranks:
            raise RemoteProtocolError(
                "record has an engine rank outside its instance", engine_rank=engine_rank, num_ranks=self.num_ranks
            )
        _check_endpoint(self.endpoint)


class RankRecord(RankAddress, frozen=True, kw_only=True):
    """A rank's address and KV layout, as published in the directory."""

    layout: KVLayout


class SealedRecord(RankAddress, frozen=True, kw_only=True):
    """A record as a directory stores and forwards it. The directory does not decode the layout."""

    layout: msgspec.Raw

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "layout", self.layout.copy())  # a slice would keep the whole message alive

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes."""
        return len(memoryview(self.layout)) + len(self.endpoint)


class Register(Message, frozen=True, tag="register"):
    """Rank -> registry: store this record, or renew its lease. It expires `lease_s` after the last Register."""

    record: RankRecord
    lease_s: Lease


class SealedRegister(Message, frozen=True, tag="register"):
    """A Register as a directory decodes it."""

    record: SealedRecord
    lease_s: Lease


class Registered(Message, frozen=True, tag="registered"):
    """Registry -> rank: your record is stored."""

    peer: PeerId


class RegistrationConflict(Message, frozen=True, tag="registration_conflict"):
    """Registry -> rank: another running process registers the same rank.

    Attributes:
        peer: The incarnation that this message is sent to.
        other: The other incarnation.
        other_endpoint: Control address of the other incarnation.
        refused: True if lookups return `other` instead of `peer`.
    """

    peer: PeerId
    other: PeerId
    other_endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    refused: bool


class Unregister(Message, frozen=True, tag="unregister"):
    """Rank -> registry: remove this incarnation."""

    peer: PeerId


class Lookup(Message, frozen=True, tag="lookup"):
    """Rank -> registry, or prefill rank serving as its instance's directory: send an instance's records once complete.

    Attributes:
        instance: Name of the instance; None for the instance of the rank that answers. Such a rank returns its own
            instance whatever the name. A registry answers `EVERY_INSTANCE` at once with up to `MAX_LISTED` ranks,
            without layouts.
        timeout_s: How long the directory may wait until all ranks are registered.
        number: The answer repeats the highest number received, which shows that it is newer than that lookup.
    """

    instance: InstanceName | None
    timeout_s: LookupTime
    number: LookupNumber = 0


class Records(Message, frozen=True, tag="records"):
    """The answer to a Lookup.

    Attributes:
        instance: Name of the instance; None if a registry received a Lookup without a name.
        records: The instance's ranks by engine rank; incomplete if the lookup timed out.
        number: The highest number of the lookups that this answers.
    """

    instance: InstanceName | None
    records: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=MAX_RANKS_TOLD)]
    number: LookupNumber = 0


class SealedRecords(Message, frozen=True, tag="records"):
    """Records as a directory sends them."""

    instance: InstanceName | None
    records: tuple[SealedRecord, ...]
    number: LookupNumber = 0
