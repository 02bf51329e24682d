"""A fleet under load whose processes are replaced by newer ones, one after the other."""

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

import kvflow
from kvflow.keys import add_peer, add_registry, make_keys
from tests.fleet.fleet import REGISTRY, Fleet, Variant, count_reasons, open_fleet
from tests.support.ports import unused_port
from tests.support.waiting import until
from tests.versions.version import NEWER, Version

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

AT_ONCE: Final = 8

BETWEEN: Final = 40
"""Requests that end before the first process is replaced, and after each."""

PREFILL: Final = ("prefill-0", "prefill-1")
DECODE: Final = ("decode-0", "decode-1")

ORDERS: Final = {
    "prefill first": (REGISTRY, *PREFILL, *DECODE),
    "decode first": (*DECODE, *PREFILL, REGISTRY),
}

TYPED: Final = {*(reason.value for reason in kvflow.FailureReason), kvflow.RankDraining.__name__}
"""Why a request may be sent again: a transfer has failed, or a rank has refused it because it drains."""

Keys = Mapping[tuple[str, str], str]


def make_all_keys(place: Path, *versions: Version) -> Keys:
    """Create keys of each process for each version, which are all trusted, as in a rotation; return their places."""
    names = (REGISTRY, *PREFILL, *DECODE)
    found = {(version.name, name): str(place / version.name / name) for version in versions for name in names}
    public = {of: make_keys(path) for of, path in found.items()}
    for path in found.values():
        for (_, name), key in public.items():
            if name == REGISTRY:
                add_registry(path, key)
            else:
                add_peer(path, key, name)
    return found


def variant_of(version: Version, name: str, keys: Keys) -> Variant:
    """Return what a process has; newer ones have smaller pages, another number of ranks, and other keys."""
    is_newer, is_prefill = version is NEWER, name in PREFILL
    changes: dict[str, Any] = {"page_tokens": 8 if is_newer else 16, "num_ranks": 2 if is_newer is is_prefill else 1}
    if keys:
        changes["keys"] = keys[version.name, name]
    return Variant(version.environment, changes)


async def end_more(fleet: Fleet) -> None:
    """Wait until more requests have ended, or one has gone wrong; the time limit of the test applies."""
    before = len(fleet.outcomes)
    await until(lambda: len(fleet.outcomes) >= before + BETWEEN or fleet.violations)
    assert not fleet.violations


@pytest.mark.parametrize(
    ("backend", "has_keys"),
    [("nixl", False), ("nixl", True), ("mooncake", False)],
    ids=["plain", "other keys", "mooncake"],
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_every_request_is_answered_while_processes_get_newer(
    older: Version, order: Sequence[str], backend: str, has_keys: bool, tmp_path: Path
) -> None:
    keys = make_all_keys(tmp_path, older, NEWER) if has_keys else {}
    at, over = f"tcp://127.0.0.1:{unused_port()}", anyio.Event()
    async with open_fleet(at, 2, 2, backend, variants=lambda name: variant_of(older, name, keys)) as fleet:
        assert set(fleet.libraries().values()) == {older.library}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.load, AT_ONCE, over, random.Random(1))  # noqa: S311 - repeatable
            await end_more(fleet)
            for name in order:
                fleet.variants[name] = variant_of(NEWER, name, keys)
                await fleet.renew(name)
                await end_more(fleet)
            over.set()
        assert set(fleet.libraries().values()) == {NEWER.library}
        await fleet.settle()
        await fleet.close()
    reasons = count_reasons(fleet.outcomes)
    sys.stdout.write(f"{len(fleet.outcomes)} requests, sent again because of {dict(reasons)}\n")
    assert not fleet.violations
    assert reasons.keys() <= TYPED
