"""Drawings of memory as text, for documents: one box for each cell, in the order of the addresses."""

from collections.abc import Iterator

from kvflow.geometry import Region


def draw(*regions: Region, slot: int = 0, per_row: int = 4) -> str:
    """Draw one slot of some regions.

    Each row starts with its offset in bytes from the lowest address of all regions; a gap between cells starts a new
    row.
    """
    base = min(region.address for region in regions)
    several = len({region.layer for region in regions}) > 1
    boxes = sorted(box for region in regions for box in _boxes(region, slot, several))
    width = max(len(label) for _, _, label in boxes)
    rows: list[tuple[int, list[str]]] = []
    end = -1
    for address, size, label in boxes:
        if address != end or len(rows[-1][1]) == per_row:
            rows.append((address - base, []))
        rows[-1][1].append(f" {label:<{width}} ")
        end = address + size
    margin = len(str(rows[-1][0]))
    return "\n".join(f"{offset:>{margin}} |{'|'.join(labels)}|" for offset, labels in rows)


def _boxes(region: Region, slot: int, several: bool) -> Iterator[tuple[int, int, str]]:
    """Yield address, size and label of each cell of a slot."""
    for cell in range(region.cells_per_slot):
        for head in range(*region.heads):
            address = (
                region.address
                + slot * region.slot_stride
                + cell * region.token_stride
                + (head - region.heads[0]) * region.head_stride
            )
            yield address, region.head_bytes, _label(region, cell, head, several)


def _label(region: Region, cell: int, head: int, several: bool) -> str:
    words = [region.tensor]
    if several:
        words.append(f"L{region.layer}")
    if region.tokens_per_cell > 1:
        words.append(f"t{cell * region.tokens_per_cell}-{(cell + 1) * region.tokens_per_cell - 1}")
    elif region.tokens_per_slot > 1:
        words.append(f"t{cell}")
    if region.num_heads > 1 or region.heads[0]:
        words.append(f"h{head}")
    return " ".join(words)
