"""What the event loop does itself, because waking the owner thread would take longer."""

import threading
from typing import Any

import pytest

from kvflow.backends.base import PostEnded
from tests.backends.endpoints import copies, open_endpoints, same
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_BYTES = 4096


@pytest.fixture
def posting_threads(monkeypatch: pytest.MonkeyPatch, api: Any) -> list[str]:
    """Names of the threads that make native posts from now on."""
    names: list[str] = []
    transfer = api.nixl_agent.transfer

    def record(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return transfer(*arguments)

    monkeypatch.setattr(api.nixl_agent, "transfer", record)
    return names


@pytest.mark.parametrize(("limit", "is_inline"), [(NUM_BYTES, True), (NUM_BYTES - 1, False)])
async def test_the_event_loop_posts_short_writes_once_a_connection_is_used(
    posting_threads: list[str], limit: int, is_inline: bool
) -> None:
    async with open_endpoints("nixl", NUM_BYTES, options={"inline_bytes": limit}) as (source, target):
        for post_id in range(2):
            source.post(post_id, target, copies(source, target, (0,), NUM_BYTES), b"notice")
            await source.take_ends(post_id + 1)
            await target.take_notices(post_id + 1)
            await until(lambda: not source.backend._owner._unfinished)  # type: ignore[attr-defined] # it is idle
        assert same(source, target)
        owner = f"kvflow-nixl-{source.name}"
        assert posting_threads == [owner, threading.current_thread().name if is_inline else owner]
        assert source.events == [PostEnded(0, None), PostEnded(1, None)]
