"""Head ranges, from the total head count."""

import pytest

from kvflow.errors import LayoutError
from kvflow.geometry import head_range


@pytest.mark.parametrize(
    ("total", "tp_size", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (8, 8, [(head, head + 1) for head in range(8)]),
        (3, 6, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
        (1, 4, [(0, 1)] * 4),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
    ],
)
def test_heads_are_split_or_replicated(total: int, tp_size: int, expected: list[tuple[int, int]]) -> None:
    assert [head_range(total, tp_size, rank) for rank in range(tp_size)] == expected


@pytest.mark.parametrize("total", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 8])
def test_every_head_is_held_equally_often(total: int, tp_size: int) -> None:
    if total % tp_size and tp_size % total:
        with pytest.raises(LayoutError, match="spread evenly"):
            head_range(total, tp_size, 0)
        return
    held = [head for rank in range(tp_size) for head in range(*head_range(total, tp_size, rank))]
    assert {head: held.count(head) for head in held} == dict.fromkeys(range(total), max(1, tp_size // total))


@pytest.mark.parametrize(("total", "tp_size", "tp_rank"), [(0, 1, 0), (-1, 1, 0), (8, 0, 0), (8, 2, 2), (8, 2, -1)])
def test_impossible_counts_are_refused(total: int, tp_size: int, tp_rank: int) -> None:
    with pytest.raises(LayoutError):
        head_range(total, tp_size, tp_rank)
