"""Transfers that fail: all parties learn the reason, and pages are freed only when nothing can touch them."""

import anyio
import pytest

from kvflow.bounds import Bounds
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, LocalProtocolError, Stage, TransferFailed
from kvflow.state.tables import Memory, Outcome
from tests.support.failures import catch, undisturbed
from tests.support.instances import BACKENDS, SOON_QUARANTINED, Request, deploy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def send_and_expect(request: Request, failures: dict[str, TransferFailed], rank: int = 0) -> None:
    failures[f"prefill/{rank}"] = await catch(lambda: request.send(rank, chunk=4))


async def receive_and_expect(request: Request, failures: dict[str, TransferFailed], rank: int = 0) -> None:
    failures[f"decode/{rank}"] = await catch(lambda: request.receive(rank))


def has_failed(request: Request, rank: int) -> bool:
    """Return whether a prefill rank reports its room as failed, even if its pages are not safe yet."""
    return rank in request.senders and request.senders[rank].failure is not None


@pytest.mark.parametrize("backend", BACKENDS)
async def test_prefill_engine_leaves_in_the_middle(backend: str) -> None:
    async with deploy(backend, decode_tp=2) as deployment:
        request = deployment.request(1, 12)
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive_and_expect, request, failures, 0)
            tasks.start_soon(receive_and_expect, request, failures, 1)
            sender = deployment.prefill[0].send(1)

            async def send_and_stumble() -> None:
                async with sender:
                    request.compute(0, 4)
                    await sender.chunk((0, 4), request.src_pages(0, (0, 4)))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await send_and_stumble()
            assert (sender.outcome, sender.memory) == (Outcome.ABORTED, Memory.SAFE)
        for failure in failures.values():
            assert (failure.reason, failure.detected_by) == (FailureReason.ABORTED, "prefill/0")
            assert not failure.quarantined
        await undisturbed(deployment)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_decode_engine_leaves_in_the_middle(backend: str) -> None:
    async with deploy(backend, prefill_tp=2) as deployment:
        request = deployment.request(1, 12)
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures, 0)
            async with request.receiver() as receiver:
                await until(lambda: deployment.prefill[1].statistics().waiting_grants)
            assert (receiver.outcome, receiver.memory) == (Outcome.ABORTED, Memory.SAFE)
        failure = failures["prefill/0"]
        assert (failure.reason, failure.detected_by) == (FailureReason.ABORTED, "decode/0")
        await undisturbed(deployment)


async def test_cancelled_scope_waits_for_the_proof_and_then_lets_go() -> None:
    """The engine cancels while the transport holds a write: the block is left only when the write has ended."""
    timeouts = Timeouts(drain_s=30.0, lease_s=2.0)
    async with deploy(timeouts=timeouts, limits=Bounds(posts_per_peer=1)) as deployment:
        request = deployment.request(1, 8)
        (faults,) = deployment.faults
        faults.hold()
        failures: dict[str, TransferFailed] = {}
        left = anyio.Event()
        scope = anyio.CancelScope()
        receiver = request.receiver()

        async def receive() -> None:
            with scope:
                async with receiver:
                    await receiver.done()
            left.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            tasks.start_soon(receive)
            await until(lambda: faults.posted)
            scope.cancel()
            await until(lambda: receiver.memory is Memory.DRAINING)
            await until(lambda: has_failed(request, 0))  # after this it posts nothing more
            await anyio.wait_all_tasks_blocked()
            assert not left.is_set()
            assert request.num_written() == 0
            faults.release()
            await left.wait()
            written = request.num_written()
            assert receiver.memory is Memory.SAFE
        await undisturbed(deployment)
        assert failures["prefill/0"].reason is FailureReason.ABORTED
        assert written == 4 * 192  # only the posted chunk; the queued ones were dropped


async def test_one_prefill_rank_failing_fails_all_parties_at_once() -> None:
    async with deploy(prefill_tp=3, decode_tp=2) as deployment:
        request = deployment.request(1, 12)
        deployment.faults[1].plan.append("fail")
        for busy in (0, 2):
            deployment.faults[busy].hold()
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            for rank in range(3):
                tasks.start_soon(send_and_expect, request, failures, rank)
            for rank in range(2):
                tasks.start_soon(receive_and_expect, request, failures, rank)
            await until(lambda: all(has_failed(request, busy) for busy in (0, 2)))
            for busy in (0, 2):
                deployment.faults[busy].release()
        assert len(failures) == 5
        first = failures["prefill/1"]
        assert (first.reason, first.stage, first.detected_by) == (FailureReason.WRITE_FAILED, Stage.SUBMIT, "prefill/1")
        for failure in failures.values():
            assert (failure.reason, failure.detected_by, failure.detail) == (
                first.reason,
                first.detected_by,
                "scripted failure",
            )
            assert not failure.quarantined
        await undisturbed(deployment)


async def test_write_in_doubt_keeps_the_pages_in_quarantine() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].plan.append("doubt")
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            tasks.start_soon(receive_and_expect, request, failures)
        assert all(failure.quarantined for failure in failures.values())
        assert all(failure.reason is FailureReason.WRITE_FAILED for failure in failures.values())
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        assert [transfer.room for transfer in prefill.quarantined()] == [1]
        assert [transfer.room for transfer in decode.quarantined()] == [1]
        assert prefill.statistics().quarantined == decode.statistics().quarantined == 1
        other = deployment.request(2, 8)
        await other.hand_over()
        other.assert_arrived()


async def test_lost_notice_is_a_success_for_nobody() -> None:
    """Every byte is written, but decode receives no notice: prefill must not report delivery."""
    async with deploy() as deployment:
        await undisturbed(deployment)  # the first handshake may take longer than this transfer may
        request = deployment.request(1, 8)
        deployment.faults[0].plan += [None, "lose_notice"]
        receiver = request.receiver(timeout_s=0.5)
        failures: dict[str, TransferFailed] = {}

        async def receive() -> None:
            async with receiver:
                await receiver.done()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            failure = await catch(receive)
        assert failure.reason is failures["prefill/0"].reason is FailureReason.DEADLINE
        assert receiver.memory is Memory.SAFE
        await undisturbed(deployment)


async def test_deadline_reaches_both_sides() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        await undisturbed(deployment)  # the first handshake may take longer than this transfer may
        request = deployment.request(1, 8)
        failures: dict[str, TransferFailed] = {}
        deployment.faults[0].hold()

        async def receive() -> None:
            async with request.receiver(timeout_s=0.3) as receiver:
                await receiver.done()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            failure = await catch(receive)
            assert failure.quarantined  # the held write had not ended within the drain time
            deployment.faults[0].release()
        assert failure.reason is failures["prefill/0"].reason is FailureReason.DEADLINE
        await undisturbed(deployment)
        await until(lambda: not deployment.decode[0].quarantined())  # the late end of the write is the proof


async def test_late_proof_ends_the_quarantine() -> None:
    async with deploy(timeouts=SOON_QUARANTINED) as deployment:
        request = deployment.request(1, 4)
        deployment.faults[0].hold()
        failures: dict[str, TransferFailed] = {}
        receiver = request.receiver()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            async with receiver:
                await until(lambda: deployment.faults[0].posted)
        assert receiver.memory is Memory.QUARANTINED
        assert [record.room for record in deployment.decode[0].quarantined()] == [receiver.room]
        deployment.faults[0].release()
        await until(lambda: receiver.memory is Memory.SAFE)
        assert deployment.decode[0].quarantined() == []
        await undisturbed(deployment)


async def test_room_can_be_used_again_at_once() -> None:
    async with deploy() as deployment:
        for _ in range(5):
            request = deployment.request(1, 8)
            await request.hand_over()
            request.assert_arrived()
            deployment.give_back(request)


async def test_retry_after_failure_is_another_transfer() -> None:
    """The retry succeeds with the same room number, and nothing of the first transfer counts for it."""
    async with deploy(prefill_tp=2) as deployment:
        request = deployment.request(1, 8)
        deployment.faults[0].plan.append("fail")
        deployment.faults[1].hold()
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures, 0)
            tasks.start_soon(send_and_expect, request, failures, 1)
            tasks.start_soon(receive_and_expect, request, failures)
            await until(lambda: has_failed(request, 1))
            deployment.faults[1].release()
        await deployment.settle()
        await request.hand_over(chunk=4)
        request.assert_arrived()


async def test_not_ready_device_fails_only_its_transfer() -> None:
    class BrokenEvent:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    async with deploy() as deployment:
        request = deployment.request(1, 4)
        failures: dict[str, TransferFailed] = {}

        async def send() -> None:
            async with deployment.prefill[0].send(1) as sender:
                await sender.finish((0, 4), request.src_pages(0, (0, 4)), ready=BrokenEvent())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive_and_expect, request, failures)
            failure = await catch(send)
        assert failure.reason is failures["decode/0"].reason is FailureReason.NOT_READY
        assert "device lost" in failure.detail
        await undisturbed(deployment)


async def test_pages_are_read_only_when_the_device_is_ready() -> None:
    class SlowEvent:
        def __init__(self) -> None:
            self.is_ready = anyio.Event()

        def synchronize(self) -> None:
            anyio.from_thread.run(self.is_ready.wait)

    async with deploy() as deployment:
        request = deployment.request(1, 4)
        ready = SlowEvent()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.receive)
            async with deployment.prefill[0].send(1) as sender:
                await sender.finish((0, 4), request.src_pages(0, (0, 4)), ready=ready)
                await until(lambda: deployment.prefill[0].statistics().queued_chunks)
                request.compute(0, 4)
                ready.is_ready.set()
        request.assert_arrived()


async def test_a_transfer_is_entered_only_once() -> None:
    """A second entry must neither repeat the first success nor leave the room granted."""
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        receiver = request.receiver()

        async def receive() -> None:
            async with receiver:
                await receiver.done()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            tasks.start_soon(request.send)
        with pytest.raises(LocalProtocolError, match="only once"):
            await receive()
        with pytest.raises(LocalProtocolError, match="only once"):
            await request.senders[0].__aenter__()
        assert deployment.decode[0].statistics().rooms == 0
        await undisturbed(deployment)


async def test_nothing_is_waited_for_before_it_has_begun() -> None:
    async with deploy() as deployment:
        with pytest.raises(LocalProtocolError, match="async with"):
            await deployment.request(1, 8).receiver().done()
        with pytest.raises(LocalProtocolError, match="async with"):
            await deployment.prefill[0].send(1).delivered()


async def test_posts_in_doubt_give_their_credit_back() -> None:
    async with deploy(timeouts=SOON_QUARANTINED, limits=Bounds(posts_per_peer=1)) as deployment:
        request = deployment.request(1, 4)
        deployment.faults[0].plan.append("doubt")
        failures: dict[str, TransferFailed] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_expect, request, failures)
            tasks.start_soon(receive_and_expect, request, failures)
        for room in (2, 3):
            other = deployment.request(room, 8)
            await other.hand_over(chunk=4)
            other.assert_arrived()
