"""Key changes during transfers, without a restart."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

import kvflow
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, TransferFailed
from kvflow.keys import add_peer, add_registry, make_capability_key, make_keys
from kvflow.trust import ClientKeys, Trust, TrustedKey
from tests.attack.guarded import BACKENDS, Attacker, Guarded, guarded, outcome, works
from tests.support.instances import Deployment, anomalies_of, deploy
from tests.support.trusts import new_trust, trusts
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def everybody(deployment: Guarded) -> dict[str, Callable[[Trust], None]]:
    return {
        "registry": deployment.registry.reload_trust,
        "prefill": deployment.prefill[0].reload_trust,
        "decode": deployment.decode[0].reload_trust,
    }


@pytest.mark.parametrize("backend", BACKENDS)
async def test_all_keys_are_rotated_under_transfers(backend: str) -> None:
    """First all sides also trust the new keys; then each switches to its own; then the old ones are removed."""
    async with guarded(backend=backend) as deployment:
        numbers = iter(range(1, 10_000))
        done: list[None] = []
        is_over = False

        async def transfers() -> None:
            while not is_over:
                await works(deployment, next(numbers))
                done.append(None)

        new = {name: new_trust() for name in ("registry", "prefill", "decode")}
        old = deployment.keys
        peers = tuple(TrustedKey(keys[name].public, name) for keys in (old, new) for name in ("prefill", "decode"))
        registry = (old["registry"].public, new["registry"].public)
        both = {name: replace(old[name], peers=peers, registry=registry) for name in new}
        taken = {name: replace(both[name], public=one.public, secret=one.secret) for name, one in new.items()}
        last = {name: replace(one, peers=peers[2:], registry=registry[1:]) for name, one in taken.items()}
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(transfers)
            for step in (both, taken, last):
                for name, reload_trust in everybody(deployment).items():
                    enough = len(done) + 20
                    reload_trust(step[name])
                    await until(lambda enough=enough: len(done) >= enough)  # type: ignore[misc]
            is_over = True
        assert anomalies_of(deployment.prefill[0].statistics()).keys() <= {"key_refused", "message_lost"}
        with closing(Attacker(deployment.prefill[0].endpoint, ClientKeys(old["decode"], registry))) as attacker:
            await until(lambda: attacker.refused)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_key_that_is_struck_off_is_disconnected_and_its_transfers_fail(backend: str) -> None:
    async with guarded(backend=backend) as deployment:
        await works(deployment)
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        request = deployment.request(2, 12)

        failures: list[TransferFailed | None] = []

        async def note() -> None:
            failures.append(await outcome(request.receive))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note)
            await until(lambda: prefill.statistics().waiting_grants)
            prefill.reload_trust(replace(deployment.keys["prefill"], peers=()))
            await until(lambda: not prefill.statistics().peers)
            assert prefill.statistics().anomalies["peer_revoked"] == 1
            await until(lambda: not decode.statistics().peers)
        assert failures[0] is not None
        failure = await outcome(deployment.request(3, 12).receive)
        assert failure is not None
        assert f"key {deployment.keys['decode'].public[:12]} of this process is not listed" in failure.detail
        prefill.reload_trust(deployment.keys["prefill"])
        await eventually_works(deployment)


async def test_a_key_that_is_moved_to_another_instance_is_disconnected_although_its_own_has_a_second_one() -> None:
    """This is the end of a rotation in which another instance gets the old key."""
    async with guarded() as deployment:
        prefill, own, second = deployment.prefill[0], deployment.keys["decode"].public, new_trust().public
        listed = (*deployment.keys["prefill"].peers, TrustedKey(second, "decode"))
        prefill.reload_trust(replace(deployment.keys["prefill"], peers=listed))
        await works(deployment)
        request = deployment.request(2, 12)
        deployment.faults[0].hold()
        failures: dict[str, TransferFailed | None] = {}

        async def note(side: str, transfer: Callable[[], Awaitable[object]]) -> None:
            failures[side] = await outcome(transfer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note, "prefill", request.send)
            tasks.start_soon(note, "decode", request.receive)
            await until(lambda: prefill.statistics().posted)
            moved = tuple(TrustedKey(one.key, "elsewhere") if one.key == own else one for one in listed)
            prefill.reload_trust(replace(deployment.keys["prefill"], peers=moved))
            with anyio.fail_after(3 * prefill.config.timeouts.lease_s):
                await until(lambda: not prefill.statistics().peers)
            deployment.faults[0].release()
        assert None not in failures.values()


async def eventually_works(deployment: Deployment) -> None:
    """Retry transfers until one succeeds, once the other side is no longer paused."""
    with anyio.fail_after(20):
        for room in range(100, 200):
            request = deployment.request(room, 4)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outcome, request.send)
                failure = await outcome(request.receive)
                tasks.cancel_scope.cancel()
            deployment.give_back(request)
            if failure is None:
                return
            await anyio.sleep(0.2)


async def test_a_decode_rank_leaves_a_prefill_instance_that_is_struck_off() -> None:
    async with guarded() as deployment:
        await works(deployment)
        decode = deployment.decode[0]
        decode.reload_trust(replace(deployment.keys["decode"], peers=()))
        await until(lambda: not decode.statistics().peers)
        failure = await outcome(deployment.request(3, 12).receive)
        assert failure is not None
        assert failure.reason is FailureReason.REFUSED
        assert "no key is listed for it here" in failure.detail


async def test_lists_are_read_again_from_files(tmp_path: Path) -> None:
    registry, keys = trusts("prefill", "decode")
    path = tmp_path / "keys"
    make_keys(path)
    (path / "registry").write_text(f"{registry.public}\n")
    own = kvflow.load_trust(path)
    listed = replace(keys["decode"], peers=(TrustedKey(own.public, "prefill"),))
    served = replace(registry, peers=(TrustedKey(own.public, "prefill"), TrustedKey(keys["decode"].public, "decode")))
    async with deploy(sending={"trust": own}, receiving={"trust": listed}, registry_trust=served) as deployment:
        failure = await outcome(deployment.request(1, 4).receive)
        assert failure is not None
        (path / "peers").write_text(f"# those who may ask\n{keys['decode'].public} decode\n")
        deployment.prefill[0].reload_trust()
        await eventually_works(deployment)


async def test_capabilities_are_not_switched_off_by_a_file_that_is_being_replaced(tmp_path: Path) -> None:
    registry, keys = trusts("prefill", "decode")
    path = tmp_path / "keys"
    make_keys(path)
    make_capability_key(path)
    add_registry(path, registry.public)
    add_peer(path, keys["decode"].public, "decode")
    own = kvflow.load_trust(path)
    listed = replace(keys["decode"], peers=(TrustedKey(own.public, "prefill"),))
    served = replace(registry, peers=(TrustedKey(own.public, "prefill"), TrustedKey(keys["decode"].public, "decode")))
    async with deploy(sending={"trust": own}, receiving={"trust": listed}, registry_trust=served) as deployment:
        request = deployment.request(1, 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, request.send)
            (path / "capability.key").write_text("")
            with pytest.raises(ConfigError, match="truncated"):
                deployment.prefill[0].reload_trust()
            (path / "capability.key").unlink()
            with pytest.raises(ConfigError, match="turning capabilities off needs a restart"):
                deployment.prefill[0].reload_trust()
            failure = await outcome(request.receive)
            assert failure is not None
            assert failure.detail.endswith("a capability is required")
            tasks.cancel_scope.cancel()


async def test_misuse(tmp_path: Path) -> None:
    async with guarded() as deployment, deploy() as plain:
        rank = deployment.prefill[0]
        with pytest.raises(ConfigError, match="there is no key directory to reload"):
            rank.reload_trust()
        with pytest.raises(ConfigError, match="switching between plain and encrypted transport"):
            rank.reload_trust(Trust.none())
        with pytest.raises(ConfigError, match="switching between plain and encrypted transport"):
            plain.decode[0].reload_trust(deployment.keys["decode"])
        with pytest.raises(ConfigError, match="load it with"):
            rank.reload_trust("keys")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="key file does not exist"):
            deployment.registry.reload_trust(kvflow.load_trust(tmp_path))
        await works(deployment)
    for one in (rank, deployment.registry):
        with pytest.raises(LocalProtocolError, match="not open"):
            one.reload_trust()
