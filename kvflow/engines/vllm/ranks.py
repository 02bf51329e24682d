"""The ranks of one worker: one for prefill, one for decode, or both on one transport."""

import math
import os
import select
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import kvflow
import kvflow.blocking
from kvflow import KVLayout, SharedBackend
from kvflow.addresses import SCHEME, split_address
from kvflow.blocking import BlockingReceiver, BlockingSender, LoopThread, TransferUpdate
from kvflow.engines.vllm.bootstrap import serve_query
from kvflow.engines.vllm.dialect import Reference
from kvflow.engines.vllm.options import TIMEOUTS, Options

__all__ = ["Place", "Ranks", "open_ranks"]


@dataclass(frozen=True)
class Place:
    """Position and roles of this worker.

    Attributes:
        instance: Name of the server.
        engine_rank: Number of the worker.
        num_ranks: Workers of the server.
        is_prefill: Requests are computed here for other servers.
        is_decode: Requests that others have computed continue here.
        share: Broadcasts the first worker's value to all workers.
        port: Port of the first prefill worker; 0 for a free one.
    """

    instance: str
    engine_rank: int
    num_ranks: int
    is_prefill: bool
    is_decode: bool
    share: Callable[[str | None], str]
    port: int = 0


class Ranks:
    """The ranks of a worker: one that sends, one that receives, or both.

    Args:
        prefill: The rank that sends.
        decode: The rank that receives.
        stack: Closes them.
        reopen: Opens the same ranks again; the first prefill worker gets the port that it is called with.
    """

    def __init__(
        self,
        prefill: kvflow.blocking.PrefillRank | None,
        decode: kvflow.blocking.DecodeRank | None,
        stack: ExitStack,
        reopen: Callable[[int], "Ranks"],
    ) -> None:
        self._reopen = reopen
        self._prefill = prefill
        self._decode = decode
        self._ranks = [rank for rank in (prefill, decode) if rank is not None]
        self._stack = stack
        self._changed = select.poll()
        for rank in self._ranks:
            self._changed.register(rank.fileno(), select.POLLIN)

    @property
    def ticket(self) -> dict[str, object] | None:
        """A ticket of this process, for no room in particular; None if it does not prefill."""
        return None if self._prefill is None else self._prefill.ticket("any")

    def send(self, room: str, label: str) -> BlockingSender:
        """Start to send a room, whose lease starts when its ticket leaves; KvflowError if the rank cannot send it."""
        if self._prefill is None:
            raise kvflow.LocalProtocolError("this server does not prefill", room=room)
        return self._prefill.send(room, label=label, defer_lease=True)

    def announce(self, reference: Reference, label: str) -> BlockingReceiver:
        """Announce a room to be received; KvflowError if the rank cannot announce it."""
        if self._decode is None:
            raise kvflow.LocalProtocolError("this server does not decode", prefill=reference.prefill)
        return self._decode.announce(
            reference.room, prefill=reference.prefill, label=label, priority=reference.priority
        )

    def decline(self, reference: Reference, detail: str) -> None:
        """Tell prefill that a room will not be received here, if the reference is usable."""
        if self._decode is not None:
            with suppress(kvflow.KvflowError):
                self._decode.decline(reference.room, prefill=reference.prefill, detail=detail)

    def completed(self) -> list[TransferUpdate[Any]]:
        """Return the updates of transfers since the last call."""
        return [update for rank in self._ranks for update in rank.completed()]

    def wait_any(self, timeout_s: float) -> list[TransferUpdate[Any]]:
        """Wait until a transfer has changed, or until the timeout, and return the updates."""
        self._changed.poll(math.ceil(timeout_s * 1e3))
        return self.completed()

    def close(self) -> None:
        """Close the ranks."""
        self._stack.close()

    def reopen(self) -> "Ranks":
        """Open the same ranks again after `close`, prefill at the same port; errors as in `open_ranks`."""
        return self._reopen(0 if self._prefill is None else split_address("endpoint", self._prefill.endpoint)[1])


def open_ranks(options: Options, place: Place, layout: KVLayout) -> Ranks:
    """Open the ranks of a worker, or raise KvflowError; the first worker of a server answers for the others."""
    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread(_cpus(options)))
        backend = SharedBackend(options.backend, options.backend_options)

        def make(rank: Any, config: Any) -> Any:
            return stack.enter_context(rank(config, layout, backend, loop=loop))

        prefill = decode = None
        if place.is_prefill and place.engine_rank == 0:
            prefill = make(kvflow.blocking.PrefillRank, _prefill_config(options, place, port=place.port))
        if place.is_prefill:
            first = place.share(None if prefill is None else prefill.endpoint)
            if options.mooncake_port is not None and place.engine_rank == 0:
                stack.enter_context(serve_query(options.host, options.mooncake_port, first, loop))
            if prefill is None:
                prefill = make(kvflow.blocking.PrefillRank, _prefill_config(options, place, first))
        if place.is_decode:
            decode = make(kvflow.blocking.DecodeRank, _decode_config(options, place))
        return Ranks(
            prefill, decode, stack.pop_all(), lambda port: open_ranks(options, replace(place, port=port), layout)
        )


def _prefill_config(options: Options, place: Place, first: str | None = None, port: int = 0) -> kvflow.PrefillConfig:
    registry = options.registry
    if first is not None and not (registry or "").startswith(SCHEME):
        registry = first  # other directories list only the first worker
    has_several = "," in options.host
    return kvflow.PrefillConfig(
        bind=options.bind_to("*" if has_several else options.host, port),
        advertise=options.host if has_several else None,
        registry=registry,
        **_common_settings(options, place),
    )


def _decode_config(options: Options, place: Place) -> kvflow.DecodeConfig:
    return kvflow.DecodeConfig(
        registry=options.registry,
        advertise=options.host,
        signed_tickets=options.signed_tickets,
        **options.for_decode(),
        **_common_settings(options, place),
    )


def _common_settings(options: Options, place: Place) -> dict[str, Any]:
    return {
        "instance": place.instance,
        "engine_rank": place.engine_rank,
        "num_ranks": place.num_ranks,
        **options.for_rank(TIMEOUTS, {}),
    }


def _cpus(options: Options) -> tuple[int, ...] | None:
    """Return the CPUs for kvflow's threads: not those that vLLM pinned its worker to, which keeps them busy."""
    if options.affinity is not None:
        return options.affinity
    with suppress(OSError, AttributeError):
        return tuple(sorted(os.sched_getaffinity(os.getppid())))
    return None
