"""The route from a prefill rank to a decode rank, made from the decode rank's Hello. Pure."""

from kvflow.geometry.binding import bind_route
from kvflow.geometry.split import split_policy_for
from kvflow.state.events import PeerRoute
from kvflow.state.packing import packed_policy
from kvflow.state.settings import PrefillSettings
from kvflow.wire.messages import Hello

__all__ = ["link_for"]


def link_for(hello: Hello, settings: PrefillSettings) -> PeerRoute:
    """Bind the route of a Hello to both layouts, and choose how chunks for it are split.

    Args:
        hello: Hello of a decode rank; not trusted.
        settings: Settings of this rank.

    Raises:
        RouteError, PlanError: The route does not fit the two layouts.
    """
    route = bind_route(hello.route, settings.layout, hello.layout)
    limits, own = settings.limits, settings.staging
    policy = split_policy_for(route, settings.layout, hello.layout, limits.bytes_per_post, limits.bytes_per_layer_piece)
    staging = None if own is None else hello.staging
    if own is not None and staging is not None:
        slot_bytes = min(own.slot_bytes, staging.slot_bytes)
        policy = packed_policy(policy, route, slot_bytes, own.descriptor_overhead_s, own.packing)
    return PeerRoute(route, hello.layout, hello.route.slices, policy, staging)
