"""Unresponsive peers: an insider with many of them delays no other peer, although transports may wait long for each."""

from contextlib import ExitStack, closing

import anyio
import pytest

from kvflow.gate.hellos import HELLOS_AT_ONCE
from kvflow.geometry.routes import compile_routes
from tests.attack.guarded import guarded, works
from tests.attack.insiders import hello_to, insider
from tests.support.instances import make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_peers_that_do_not_answer_take_places_of_their_own_principal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with guarded("other-*") as deployment:
        prefill = deployment.prefill[0]
        connect, held = prefill._backend.connect_authenticated, list[str]()

        async def hold(peer: str, metadata: bytes, principal: str) -> None:
            if peer.startswith("other"):
                held.append(principal)
                await anyio.sleep_forever()
            await connect(peer, metadata, principal)

        monkeypatch.setattr(prefill._backend, "connect_authenticated", hold)
        layout = make_pool().layout
        route = compile_routes({0: prefill.layout}, layout, decode_rank=0)[0]
        with ExitStack() as stack:
            for number in range(3 * HELLOS_AT_ONCE):
                attacker = stack.enter_context(closing(insider(deployment, "other-*")))
                attacker.say(hello_to(deployment, instance=f"other-{number}", layout=layout, route=route))
            await until(lambda: len(held) == HELLOS_AT_ONCE)
            await works(deployment)
            assert set(held) == {"other-*"}
            assert len(held) == HELLOS_AT_ONCE
