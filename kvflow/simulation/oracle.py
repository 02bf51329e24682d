"""Knows the truth, and holds what the ranks say against it."""

from typing import TYPE_CHECKING, Final

from kvflow.errors import FailureReason
from kvflow.simulation.pool import Violation
from kvflow.simulation.prefill_host import metadata_of
from kvflow.simulation.requests import Receiving, Request, Sending
from kvflow.simulation.shapes import KV, STATE, routes_to
from kvflow.stages.submit import agent_name
from kvflow.state import effects as ef
from kvflow.state.events import DeliveryId
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import PeerId, RankId

if TYPE_CHECKING:
    from kvflow.simulation.host import Host
    from kvflow.simulation.world import World
    from kvflow.simulation.writes import Segment, Write

__all__ = ["Oracle"]

MARGIN_S: Final = 0.02
"""How late a deadline may be noticed by a process that runs."""

EXCUSES: Final = frozenset(
    {
        FailureReason.PEER_LOST,
        FailureReason.PEER_CLOSED,
        FailureReason.PEER_FAILING,
        FailureReason.DEADLINE,
        FailureReason.NOT_GRANTED,
        FailureReason.STALLED,
        FailureReason.WRITE_FAILED,
        FailureReason.ABORTED,
        FailureReason.BROKEN,
    }
)
"""Why a prefill rank may not know that decode has everything."""


class Oracle:
    """Checks the promises.

    Args:
        world: What is true.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.sendings: list[Sending] = []
        self.receivings: list[Receiving] = []
        self.requests: dict[int, list[Request]] = {}
        self._holders: dict[tuple[PeerId, int], tuple[DeliveryId, int]] = {}
        self._successes: dict[int, dict[RankId, None]] = {}

    # Pages are safe --------------------------------------------------------------------------------------------------

    def check_target(self, write: "Write", target: "Host", piece: "list[Segment]") -> None:
        """Bytes may land only in pages that are held for the transfer they were posted for."""
        receiving = self._receiving(target, write.delivery.generation)
        for _, dst, length in piece:
            if target.staging is not None and target.staging.holds(dst):
                self._check_slot(write, target, dst)
                continue
            problem = target.pool.intruded(dst, length, receiving.lease)
            if problem is not None:
                raise Violation(f"write {write.number} of {receiving.lease.name} lands in memory given back: {problem}")

    def check_source(self, write: "Write", piece: "list[Segment]") -> None:
        """Bytes may be read only from pages that are held for the room they were computed for."""
        for src, _, length in piece:
            if write.sender.staging is not None and write.sender.staging.holds(src):
                continue
            problem = write.sender.pool.intruded(src, length, write.lease)
            if problem is not None:
                raise Violation(f"write {write.number} reads pages of {write.lease.name} given back: {problem}")

    def _check_slot(self, write: "Write", target: "Host", address: int) -> None:
        """Bytes may land only in the sender's own window, and not over others that are still to be scattered."""
        area = target.core.staging
        owner = area.owner(address) if area is not None else None
        if owner != write.sender.me:
            raise Violation(f"write {write.number} of {write.sender.me} lands in the window of {owner}")
        slot = _slot(target, address)
        mine = (write.delivery, write.post_id)
        holder = self._holders.setdefault(slot, mine)
        if holder != mine:
            other = self._receiving(target, holder[0].generation)
            if other.decided_at is None:
                raise Violation(f"write {write.number} lands on what {other.lease.name} has not scattered yet")
            self._holders[slot] = mine

    def scattered(self, receiving: Receiving, address: int) -> None:
        """Pages must be held for as long as they are written from staging memory; then its slot is free."""
        if receiving.lease.is_free:
            raise Violation(f"{receiving.lease.name} is written from staging memory after it was given back")
        self._holders.pop(_slot(receiving.host, address), None)

    # Success is true -------------------------------------------------------------------------------------------------

    def handed(self, receiving: Receiving, effect: ef.ReportReceiver) -> None:
        """What is handed to the decode engine must be what prefill computed."""
        expected = metadata_of(receiving.request)
        handed = effect.handed
        if handed is None or not handed.metadata or any(one != expected for one in handed.metadata.values()):
            raise Violation(f"{receiving.lease.name}: metadata is not {expected!r}: {handed}")

    def decided(self, transfer: Sending | Receiving) -> None:
        """An outcome must be true at the moment it is reported."""
        if isinstance(transfer, Receiving):
            if transfer.outcome is Outcome.SUCCESS:
                self._check_success(transfer)
        elif transfer.outcome is Outcome.SUCCESS:
            self._check_delivered(transfer)
        self._watch_memory(transfer)

    def _check_success(self, receiving: Receiving) -> None:
        request = receiving.request
        for component, tokens in receiving.ranges.items():
            if tokens[0] < tokens[1]:
                contents = [one.content for one in self.requests[request.room]]
                problem = receiving.host.pool.check_cells(receiving.lease, component, tokens, contents)
                if problem is not None:
                    raise Violation(f"{receiving.lease.name} succeeds, but {problem}")
        self._successes.setdefault(request.room, {})[receiving.host.me.rank] = None

    def _check_delivered(self, sending: Sending) -> None:
        """All ranks of a decode instance that this rank owes something must have succeeded with the room."""
        succeeded = self._successes.get(sending.request.room, {})
        tries = self.requests[sending.request.room]
        if not any(set(self._creditors(sending, request)) <= set(succeeded) for request in tries):
            raise Violation(f"{sending.lease.name} succeeds, but only {list(map(str, succeeded))} have everything")

    def _creditors(self, sending: Sending, request: Request) -> list[RankId]:
        """Decode ranks of a try that a prefill rank has something for."""
        world = self._world
        prefill = sending.host.me.rank
        decode = world.instances[request.decode]
        creditors = []
        for rank in decode.ranks:
            bound = routes_to(world.model, world.instances[prefill.instance].shape, decode.shape, rank.engine_rank)[1]
            debts = bound[prefill.engine_rank].debts
            if KV in debts or (request.wants_state and STATE in debts):
                creditors.append(rank)
        return creditors

    def verified(self, receiving: Receiving) -> None:
        """What is compared with digests must be held for as long as that takes."""
        if receiving.lease.is_free:
            raise Violation(f"{receiving.lease.name} was compared with digests after it was given back")

    # Every transfer ends ---------------------------------------------------------------------------------------------

    def opened(self, transfer: Sending | Receiving) -> None:
        """Watch a transfer from now on; a receiver has to be decided when its time is up."""
        if isinstance(transfer, Sending):
            self.sendings.append(transfer)
            return
        self.receivings.append(transfer)
        self._expect(transfer, transfer.opened_at + transfer.timeout_s, is_memory=False)

    def finished(self, sending: Sending) -> None:
        """The engine has offered everything: from now on a sender's time is bounded."""
        timeouts = sending.host.config.timeouts
        sending.frozen_s = sending.host.frozen_s
        self._expect(sending, sending.finished_at + timeouts.grant_s + timeouts.transfer_s, is_memory=False)

    def _watch_memory(self, transfer: Sending | Receiving) -> None:
        if transfer.memory is not Memory.SAFE:
            transfer.frozen_s = transfer.host.frozen_s
            limit = self._world.schedule.now + transfer.host.config.timeouts.drain_s
            self._expect(transfer, limit, is_memory=True)

    def _expect(self, transfer: Sending | Receiving, limit: float, *, is_memory: bool) -> None:
        self._world.schedule.at(limit + MARGIN_S, self._check_ended, transfer, limit, is_memory)

    def _check_ended(self, transfer: Sending | Receiving, limit: float, is_memory: bool) -> None:
        """See whether a transfer has ended in time; a process that was stopped has that much longer."""
        host = transfer.host
        if is_memory:
            has_ended = transfer.memory in (Memory.SAFE, Memory.QUARANTINED)
        else:
            has_ended = transfer.decided_at is not None
        if has_ended or not host.is_alive:
            return
        extended = limit + host.frozen_s - transfer.frozen_s
        now = self._world.schedule.now
        if host.is_frozen or now < extended + MARGIN_S:
            self._world.schedule.at(max(extended, now + 0.1) + MARGIN_S, self._check_ended, transfer, limit, is_memory)
            return
        what = "memory is neither safe nor in quarantine" if is_memory else "has no outcome"
        raise Violation(f"{transfer.lease.name} {what} at its bound, {transfer.outcome}, {transfer.memory}")

    # At the end ------------------------------------------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Nothing may be kept of what is over, once nothing goes wrong any more."""
        for host in self._world.living():
            left = {name: count for name, count in host.leftovers().items() if count}
            if left:
                raise Violation(f"{host.me} still has {left}")
            leases = [transfer.lease for transfer in host.transfers.values() if not transfer.lease.is_free]
            if not host.pool.counts_add_up(leases):
                raise Violation(f"{host.me}: pages do not add up")

    def check_end(self) -> None:
        """What is still in quarantine must have a reason, and both sides must agree about what is over."""
        for host in self._world.living():
            for transfer in host.transfers.values():
                if transfer.memory is not Memory.QUARANTINED or not self.is_excused(transfer):
                    raise Violation(f"{transfer.lease.name} is {transfer.outcome}, {transfer.memory} at the end")
        self._check_agreement()

    def is_excused(self, transfer: Sending | Receiving) -> bool:
        """Say whether pages may stay in quarantine: only if nobody can prove any more that nothing lands in them."""
        if isinstance(transfer, Sending):
            return False
        ranks = transfer.host.core.receivers.receivers[transfer.generation].ranks.values()
        return any(self._is_unprovable(transfer, rank.peer) for rank in ranks if not rank.state.is_quiet)

    def _is_unprovable(self, receiving: Receiving, writer: PeerId) -> bool:
        """Its process is gone and its transport proves nothing by that, or it lives and something of it lingered."""
        host = self._world.lives.get(agent_name(writer))
        if host is None:
            return not self._world.is_fenced
        delivery = DeliveryId(receiving.request.room, receiving.host.me, receiving.generation)
        return delivery in self._world.plane.lingered

    def _check_agreement(self) -> None:
        """If all of decode has everything, prefill says so too, unless it has an excuse."""
        for sending in self.sendings:
            request = sending.request
            if len(self.requests[request.room]) > 1 or not sending.host.is_alive:
                continue
            mine = [receiving for receiving in self.receivings if receiving.request is request]
            successes = [receiving for receiving in mine if receiving.outcome is Outcome.SUCCESS]
            if len(successes) < request.num_decode_ranks or sending.outcome is Outcome.SUCCESS:
                continue
            failure = sending.failure
            if failure is None or failure.reason not in EXCUSES or not self._world.injected:
                raise Violation(f"decode has all of {request}, but {sending.lease.name} ends with {failure}")

    def _receiving(self, target: "Host", generation: int) -> Receiving:
        return self._world.receiving_of(target, generation)


def _slot(host: "Host", address: int) -> tuple[PeerId, int]:
    """The slot that an address in the staging memory of a rank is in."""
    start = host.staging.range.address if host.staging is not None else 0
    return host.me, (address - start) // host.config.staging_slot_bytes
