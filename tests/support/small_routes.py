"""Layouts of a few bytes, and real routes between them that are small enough to count by hand."""

from collections.abc import Sequence

from kvflow.geometry.binding import bind_route
from kvflow.geometry.layout import Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.routes import Route, compile_routes
from kvflow.geometry.split import SplitPolicy, split_policy_for
from kvflow.state.events import PeerRoute, RankRoute
from kvflow.wire.messages import StagingWindow

__all__ = ["MODEL", "PAGE_TOKENS", "layout", "peer_route", "rank_routes", "small_pieces"]

MODEL = "a model"
NUM_PAGES = 4096
PAGE_TOKENS = 2


def layout(
    component: str = "kv", *, heads: tuple[int, int] = (0, 1), num_layers: int = 1, head_bytes: int = 2
) -> KVLayout:
    """Return a layout of token-major pages of two tokens, by default with one head of two bytes."""
    num_heads = heads[1] - heads[0]
    token_bytes = num_heads * head_bytes
    pool_bytes = NUM_PAGES * PAGE_TOKENS * token_bytes
    regions = tuple(
        Region(
            tensor="k",
            layer=layer,
            address=4096 + layer * pool_bytes,
            slots=NUM_PAGES,
            slot_stride=PAGE_TOKENS * token_bytes,
            tokens_per_slot=PAGE_TOKENS,
            token_stride=token_bytes,
            heads=heads,
            head_stride=head_bytes,
            head_bytes=head_bytes,
            dtype="uint8",
        )
        for layer in range(num_layers)
    )
    return KVLayout((Component(component, regions),), MODEL, (MemoryRange(4096, num_layers * pool_bytes),))


def rank_routes(prefill: Sequence[KVLayout], decode: KVLayout) -> tuple[RankRoute, ...]:
    """Return the routes of a decode rank from each rank of an instance."""
    return tuple(
        RankRoute(route, bind_route(route, prefill[route.engine_rank], decode).expected)
        for route in compile_routes(dict(enumerate(prefill)), decode, decode_rank=0)
    )


def peer_route(
    source: KVLayout,
    target: KVLayout,
    route: Route,
    *,
    split_policy: SplitPolicy | None = None,
    staging: StagingWindow | None = None,
) -> PeerRoute:
    """Return the route that a prefill rank makes from a Hello; chunks are not split by default."""
    bound = bind_route(route, source, target)
    policy = split_policy or split_policy_for(bound, source, target, 2**30)
    return PeerRoute(bound, target, route.slices, policy, staging)


def small_pieces(piece_bytes: int, layer_piece_bytes: int | None = None, *, of: KVLayout | None = None) -> SplitPolicy:
    """Return a split policy for transfers between two ranks with the same layout."""
    side = of or layout()
    (route,) = compile_routes({0: side}, side, decode_rank=0)
    return split_policy_for(bind_route(route, side, side), side, side, piece_bytes, layer_piece_bytes)
