"""A small region, of which tests change some fields."""

from kvflow.geometry.layout import Region

__all__ = ["region"]


def region(tensor: str = "k", **changes: object) -> Region:
    """Return eight pages of four tokens with two heads of 32 bytes, with other values for some fields."""
    fields: dict[str, object] = {
        "tensor": tensor,
        "layer": 0,
        "address": 4096,
        "slots": 8,
        "slot_stride": 256,
        "tokens_per_slot": 4,
        "token_stride": 64,
        "heads": (0, 2),
        "head_stride": 32,
        "head_bytes": 32,
        "dtype": "bfloat16",
    }
    return Region(**(fields | changes))  # type: ignore[arg-type]
