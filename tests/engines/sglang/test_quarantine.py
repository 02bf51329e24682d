"""The watch over pages in quarantine, without SGLang."""

import threading
from types import SimpleNamespace
from typing import Any

from kvflow import Memory
from kvflow.blocking import DecodeRank
from kvflow.engines.sglang.quarantine import QuarantineWatch
from tests.support.instances import decode_config, make_pool
from tests.support.registries import registry_in_thread


def test_poll_does_not_wait_for_an_event_loop_that_is_busy() -> None:
    is_busy, may_go_on = threading.Event(), threading.Event()

    def block(_: object) -> None:
        is_busy.set()
        may_go_on.wait(60)

    held: list[Any] = [SimpleNamespace(memory=Memory.QUARANTINED)]
    with registry_in_thread() as endpoint, DecodeRank(decode_config(endpoint), make_pool().layout) as rank:
        blocked = rank.ask(block)
        is_busy.wait()
        watch = QuarantineWatch(None)
        for now in (1.0, 2.5, 4.0):
            watch.check_pages(rank, held, now)
        assert not blocked.done()
        may_go_on.set()
        blocked.result()
