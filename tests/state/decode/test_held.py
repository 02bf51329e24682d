"""Pages that one transfer holds are refused to another until nothing can write to them."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.errors import PagesInUse
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.state import events as ev
from kvflow.state.decode.held import BLOCK_BYTES, HeldPage, HeldPages
from kvflow.wire.messages import Drained, Pong
from tests.support.cores import ABORTED, PREFILL, DecodeDriver
from tests.support.pools import PagedShape, Pool
from tests.support.receiving import ROOM, Transfer, request
from tests.support.small_routes import layout


def asking(generation: int, *pages: int) -> ev.ReceiveOpened:
    return replace(request(generation, room=ROOM + generation), pages={"kv": np.array(pages, "<u4").tobytes()})


@pytest.fixture
def core() -> DecodeDriver:
    core = DecodeDriver(timeouts=Timeouts(drain_s=0.5))
    core.connect(PREFILL)
    core(asking(1, 3, 5))
    return core


def refusal(core: DecodeDriver, opened: ev.ReceiveOpened) -> dict[str, Any]:
    with pytest.raises(PagesInUse) as caught:
        core(opened)
    return caught.value.values


def test_a_page_that_is_held_is_refused_and_nothing_has_changed(core: DecodeDriver) -> None:
    held = {"component": "kv", "page": 5, "held_by": ROOM + 1, "memory": "held"}
    assert refusal(core, asking(2, 4, 5, 6)) == held
    core(asking(2, 4, 6))


def test_it_is_refused_until_the_last_proof(core: DecodeDriver) -> None:
    core(ev.ReceiveAborted(ROOM + 1, ABORTED))
    assert refusal(core, asking(2, 5))["memory"] == "draining"
    core.hear(PREFILL, Pong(peer=PREFILL))
    core.sleep(0.6)
    assert refusal(core, asking(2, 3))["memory"] == "quarantined"
    core.hear(PREFILL, Drained(room=ROOM + 1, generation=1, engine_rank=0))
    core(asking(2, 3, 5))


def test_an_operator_frees_it(core: DecodeDriver) -> None:
    core(ev.ReceiveAborted(ROOM + 1, ABORTED))
    core.hear(PREFILL, Pong(peer=PREFILL))
    core.sleep(0.6)
    core(ev.QuarantineReleased(1))
    core(asking(2, 3, 5))


def test_success_frees_it() -> None:
    core = DecodeDriver()
    core(request())
    transfer = Transfer(core, core.connect(PREFILL))
    page = int.from_bytes(request().pages["kv"], "little")
    assert refusal(core, asking(2, page))["page"] == page
    transfer.notice(PREFILL, 0, (0, 8), last=True)
    core(asking(2, page))


def test_flags_agree_with_a_set() -> None:
    """Holds and releases in any order."""
    rng = np.random.default_rng(7)
    held, known = HeldPages(layout()), set[int]()
    for _ in range(500):
        pages = rng.choice(64, size=rng.integers(0, 9), replace=False).astype("<u4")
        data = {"kv": pages.tobytes()}
        taken = [page for page in pages.tolist() if page in known]
        found = held.first_of(data)
        assert (None if found is None else found.page) == (taken[0] if taken else None)
        if rng.random() < 0.5:
            assert held.hold(data) == found
            known.update([] if taken else pages.tolist())
        else:
            held.drop(data)
            known.difference_update(pages.tolist())
        assert held.count() == {"kv": len(known)}


BLOCK = BLOCK_BYTES // WIRE_PAGES.itemsize


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_pages_of_every_block_of_a_long_table_are_held(count: int) -> None:
    num_pages = 4 * BLOCK
    held = HeldPages(Pool(PagedShape(num_pages, 1, (0, 1), 1, 1), 0).layout)
    order = np.random.default_rng(count).permutation(num_pages).astype(WIRE_PAGES)
    pages = {"kv": order[:count].tobytes()}
    assert held.first_of(pages) is None
    assert held.hold(pages) is None
    assert held.count() == {"kv": count}
    assert held.first_of({"kv": order[count:].tobytes()}) is None
    last = np.concatenate([order[count:], order[count - 1 : count]])  # only its last page is held
    assert held.hold({"kv": last.tobytes()}) == HeldPage("kv", int(order[count - 1]))
    assert held.count() == {"kv": count}
    held.drop(pages)
    assert held.count() == {"kv": 0}
