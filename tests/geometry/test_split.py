"""Where chunks are cut: pieces cover exactly the chunk, and are as large as allowed."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.geometry import BoundRoute, ComponentSlice, TokenRange, TokenShard, build_page_table, plan
from kvflow.geometry.expected import ExpectedBytes, LayerBytes, expected_bytes
from kvflow.geometry.pages import TokenPages
from kvflow.geometry.ranges import WHOLE, LayerRange, is_final
from kvflow.geometry.split import SplitPolicy, split_policy_for
from tests.support.links import links
from tests.support.worlds import Rank, World, execute, worlds


def split_policy(piece_bytes: int, *, page: int = 4, token_bytes: int = 10) -> SplitPolicy:
    """Return a policy of two divisible components, the second with larger pages, and an indivisible slot."""
    expected = {name: ExpectedBytes(WHOLE, WHOLE, {1: token_bytes}) for name in ("kv", "swa", "state")}
    return SplitPolicy(expected, {"kv": page, "swa": 2 * page}, piece_bytes)


def cut(rule: SplitPolicy, **ranges: TokenRange) -> list[dict[str, TokenRange]]:
    return rule.split_tokens(ranges, ranges)


def test_a_chunk_that_is_small_enough_stays_whole() -> None:
    assert cut(split_policy(100), kv=(3, 13)) == [{"kv": (3, 13)}]
    assert cut(split_policy(100), kv=(3, 5), state=(0, 1)) == [{"kv": (3, 5), "state": (0, 1)}]


def test_cuts_fall_on_page_boundaries() -> None:
    assert cut(split_policy(100), kv=(3, 31)) == [{"kv": (3, 12)}, {"kv": (12, 20)}, {"kv": (20, 28)}, {"kv": (28, 31)}]


def test_no_piece_is_smaller_than_a_page() -> None:
    assert cut(split_policy(1), kv=(3, 13)) == [{"kv": (3, 4)}, {"kv": (4, 8)}, {"kv": (8, 12)}, {"kv": (12, 13)}]


def test_what_follows_fills_the_last_piece_up() -> None:
    pieces = cut(split_policy(160), kv=(0, 20), swa=(8, 28), state=(0, 2))
    assert pieces == [{"kv": (0, 16)}, {"kv": (16, 20), "swa": (8, 16)}, {"swa": (16, 28), "state": (0, 2)}]


def test_a_slot_goes_whole_even_if_it_is_too_large() -> None:
    assert cut(split_policy(40), kv=(0, 6), state=(0, 9)) == [{"kv": (0, 4)}, {"kv": (4, 6)}, {"state": (0, 9)}]


@pytest.mark.parametrize(
    ("num_runs", "is_direct"), [(0, True), (1, True), (2, True), (2.1, False), (20, False), (math.inf, False)]
)
def test_a_chunk_in_long_runs_is_cut_as_if_nothing_were_packed(num_runs: float, is_direct: bool) -> None:
    """The chunk has 200 bytes, and runs of 100 bytes count as long."""
    direct = split_policy(100)
    packed = split_policy(40)._replace(is_packed=True, direct=direct, direct_run_bytes=100)
    assert packed.choose(200, num_runs) is (direct if is_direct else packed)


def test_without_another_rule_there_is_no_choice() -> None:
    rule = split_policy(100)
    assert rule.choose(200, 1) is rule


def test_pages_of_a_rank_that_holds_every_third_token_reach_over_three_times_the_tokens() -> None:
    shard = TokenShard(3, 1, 1)
    rule = SplitPolicy({"kv": ExpectedBytes(shard, WHOLE, {1: 10})}, {"kv": 12}, 80)
    assert cut(rule, kv=(0, 60)) == [{"kv": (0, 24)}, {"kv": (24, 48)}, {"kv": (48, 60)}]


@pytest.mark.parametrize(("piece_bytes", "page"), [(200, 8), (80, 8), (79, 4), (40, 4), (20, 2), (19, 1), (9, 1)])
def test_pages_that_do_not_fit_are_halved_until_they_do(piece_bytes: int, page: int) -> None:
    assert split_policy(200).allow_partial_pages(piece_bytes).page_tokens["swa"] == page
    assert split_policy(40).allow_partial_pages(40).split_tokens({"swa": (3, 17)}, {"swa": (3, 17)})[:2] == [
        {"swa": (3, 4)},
        {"swa": (4, 8)},
    ]


def test_no_cell_is_cut_when_pages_are_halved() -> None:
    rule = SplitPolicy({"kv": ExpectedBytes(WHOLE, WHOLE, {1: 10, 4: 10})}, {"kv": 16}, 80)
    assert rule.allow_partial_pages(1).page_tokens == {"kv": 4}


@pytest.mark.parametrize(("tokens", "expected"), [(4, [(0, 1), (1, None)]), (5, [(0, None)])])
def test_layers_that_do_not_fit_a_slot_wait_for_the_last_and_go_by_tokens(
    tokens: int, expected: list[LayerRange]
) -> None:
    costs = ExpectedBytes(WHOLE, WHOLE, {1: 20}, {1: LayerBytes.from_costs({0: 10, 1: 10})})
    rule = SplitPolicy({"kv": costs}, {"kv": 4}, 40, 1, is_packed=True)
    ranges = {"kv": (0, tokens)}
    assert [piece.layers for piece in rule.split_layers([1, 2], ranges, ranges)] == expected
    assert len(rule._replace(is_packed=False).split_layers([1, 2], ranges, ranges)) == 2


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.integers(1, 400))
def test_pieces_of_any_chunk_bring_every_wanted_cell_and_nothing_else(world: World, piece_bytes: int) -> None:
    world.compute()
    for _, bound, source, target in links(world):
        send_in_pieces(world, bound, (source, target), piece_bytes)
    world.assert_arrived()


def send_in_pieces(world: World, bound: BoundRoute, sides: tuple[Rank, Rank], piece_bytes: int) -> None:
    """Send everything as one chunk, cut; each piece is planned with the page tables of the whole."""
    rule = split_policy_for(bound, sides[0].layout, sides[1].layout, piece_bytes)
    wanted = {name: world.wanted[name] for name in bound.expected if world.wanted[name][0] < world.wanted[name][1]}
    positions = {name: start for name, (start, _) in wanted.items()}
    total = 0
    for piece in rule.split_tokens(wanted, wanted):
        components = {}
        for name, tokens in piece.items():
            assert positions[name] == tokens[0] < tokens[1]
            positions[name] = tokens[1]
            tables = [
                build_page_table(side.layout.component(name), TokenPages(wanted[name], side.pages(name, wanted[name])))
                for side in sides
            ]
            components[name] = ComponentSlice(tokens, tables[0], tables[1], is_final(tokens, wanted[name]))
        descriptors = plan(bound, components)
        assert descriptors.num_bytes == expected_bytes(bound.expected, piece, wanted)
        assert descriptors.num_bytes <= piece_bytes or is_indivisible(rule, piece, wanted)
        total += descriptors.num_bytes
        execute(descriptors, *sides)
    assert positions == {name: stop for name, (_, stop) in wanted.items()}
    assert total == expected_bytes(bound.expected, wanted, wanted)


@given(st.integers(0, 40), st.integers(1, 200), st.integers(1, 400), st.sampled_from([1, 4, 16]))
def test_a_piece_ends_only_where_another_page_would_not_fit(start: int, length: int, limit: int, page: int) -> None:
    rule = split_policy(limit, page=page)
    pieces = [piece["kv"] for piece in cut(rule, kv=(start, start + length))]
    for first, stop in pieces[:-1]:
        assert stop % page == 0
        next_stop = min(stop + page, start + length)
        assert (next_stop - first) * 10 > limit


def is_indivisible(rule: SplitPolicy, piece: dict[str, TokenRange], wanted: dict[str, TokenRange]) -> bool:
    """Return whether all bytes of a piece belong to one page of one component, or to a slot."""
    costly = [name for name in piece if expected_bytes(rule.expected, {name: piece[name]}, wanted)]
    (start, stop), size = piece[costly[0]], rule.page_tokens.get(costly[0])
    return len(costly) == 1 and (size is None or start // size == (stop - 1) // size)
