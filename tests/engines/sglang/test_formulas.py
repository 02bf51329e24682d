"""kvflow's formulas for engine authors give the same as SGLang's own functions, wherever those are defined."""

import itertools

import numpy as np
import pytest

from kvflow.geometry import group_concurrent_contiguous, head_slice
from tests.engines.sglang.test_options import answer

pytestmark = [pytest.mark.sglang]

HEADS, SIZES = [1, 2, 3, 4, 8], [1, 2, 3, 4, 6, 8]


def test_heads_are_those_of_sglang() -> None:
    """SGLang asks only for pairs of ranks that share heads, where one of the two TP sizes divides the other."""
    ours = {}
    for total, src_tp, dst_tp in itertools.product(HEADS, SIZES, SIZES):
        fits = all(not (total % size and size % total) for size in (src_tp, dst_tp))
        if not fits or max(src_tp, dst_tp) % min(src_tp, dst_tp):
            continue
        for src_rank, dst_rank in itertools.product(range(src_tp), range(dst_tp)):
            found = head_slice(total, src=(src_tp, src_rank), dst=(dst_tp, dst_rank))
            if found is not None:
                count = found.heads[1] - found.heads[0]
                ours[src_tp, dst_tp, src_rank, dst_rank, total] = [found.src_first, count, found.dst_first, count]
    theirs = answer(f"""
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params
found = [compute_head_slice_params(*case) for case in {list(ours)}]
""")
    assert len(theirs) > 300
    assert theirs == list(ours.values())


def test_groups_are_those_of_sglang() -> None:
    drawn = np.random.default_rng(1)
    cases: list[list[list[int]]] = [[[], []], [[], [1]], [[1], []]]
    for _ in range(300):
        starts = drawn.integers(0, 4, (drawn.integers(1, 13), 2)).tolist()
        cases.append([[4 * start[side] + place for place, start in enumerate(starts)] for side in range(2)])
    theirs = answer(f"""
import numpy as np
from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
found = [group_concurrent_contiguous(*(np.array(side, np.int32) for side in case)) for case in {cases}]
""")
    assert theirs == [list(group_concurrent_contiguous(*case)) for case in cases]
    assert any(len(groups) < len(case[0]) for (groups, _), case in zip(theirs, cases, strict=True))
