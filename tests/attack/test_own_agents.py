"""Peers that claim a transport agent of the prefill rank's own process, which would write into its own pools."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import pytest

import kvflow
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import RemoteProtocolError
from kvflow.geometry.routes import compile_routes
from kvflow.stages.context import agent_name
from kvflow.trust import ClientKeys
from kvflow.wire.messages import Hello, Refuse, Welcome
from tests.attack.guarded import Attacker
from tests.attack.insiders import hello_to
from tests.support.instances import decode_config, make_pool, prefill_config
from tests.support.trusts import trusts

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def both_roles() -> AsyncIterator[tuple[kvflow.PrefillRank, kvflow.DecodeRank, Attacker]]:
    """Open a prefill and a decode rank that share an agent, which the decode rank has opened, and an insider."""
    registry, keys = trusts("prefill", "decode", "other")
    shared, pool = kvflow.SharedBackend("memory"), make_pool()
    async with kvflow.Registry(trust=registry) as served:
        decode_rank = kvflow.DecodeRank(decode_config(served.endpoint, trust=keys["decode"]), pool.layout, shared)
        config = prefill_config(served.endpoint, trust=keys["prefill"])
        async with decode_rank as decode, kvflow.PrefillRank(config, pool.layout, shared) as prefill:
            insider = ClientKeys(keys["other"], (keys["prefill"].public,))
            with closing(Attacker(prefill.endpoint, insider)) as attacker:
                yield prefill, decode, attacker


def hello_of(prefill: kvflow.PrefillRank, agent: str, **changes: Any) -> Hello:
    """Return a Hello with the real metadata of an agent."""
    layout = prefill.layout
    metadata = PeerMetadata("memory", agent.encode(), RegisteredMemory.from_layout(layout)).pack()
    route = compile_routes({0: layout}, layout, decode_rank=0)[0]
    deployment: Any = SimpleNamespace(prefill=[prefill])
    return hello_to(deployment, agent=agent, backend_metadata=metadata, layout=layout, route=route, **changes)


@pytest.mark.parametrize("end", ["", "#2", "#4", "#secret"])
@pytest.mark.parametrize("whose", ["prefill", "shared"])
async def test_an_insider_has_no_agent_of_this_process(whose: str, end: str) -> None:
    async with both_roles() as (prefill, decode, attacker):
        agent = agent_name(prefill.me if whose == "prefill" else decode.me)
        attacker.say(hello_of(prefill, f"{agent}{end}"))
        refused = await attacker.answer(Refuse, 5.0)
        assert isinstance(refused, Refuse)
        assert "transport agent of this process" in refused.detail
        assert prefill.statistics().peers == 0
        assert not [one for one in attacker.heard if isinstance(one, Welcome)]


async def test_only_a_rank_of_this_process_has_its_agent() -> None:
    async with both_roles() as (prefill, decode, _):
        agent = agent_name(decode.me)
        prefill._hellos._check_agent(hello_of(prefill, agent, peer=decode.me))
        restarted = decode.me._replace(incarnation=decode.me.incarnation + 1)
        for changes in ({"peer": restarted}, {"peer": decode.me, "agent": agent_name(prefill.me)}):
            with pytest.raises(RemoteProtocolError, match="transport agent of this process"):
                prefill._hellos._check_agent(hello_of(prefill, **({"agent": agent} | changes)))
