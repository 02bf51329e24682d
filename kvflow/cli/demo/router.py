"""Passes the request to both sides, as a router does, compares their answers, and prints what a person wants to see."""

import textwrap
from typing import Final

from msgspec import structs

from kvflow import blocking
from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.demo.sides import Report, open_sides

__all__ = ["print_result", "run_demo"]

ROOM: Final = 42
"""Any number, the same on both sides; a real router draws a new one for each request."""


def run_demo(options: DemoOptions) -> Report:
    """Run both sides to their end, and print what they tell to standard error, unless `options.json`.

    Returns:
        The output of `kvflow demo --json`. `identical`: the tokens equal those of the same model run in one process.
        `tokens`: how many decode generated. `compute_ms`: how long prefill computed, and meanwhile sent.
        `handover_ms`: from "last chunk ready on prefill" to "decode may run". `stages_ms`: for each stage, the longest
        time that a rank spent in it; stages overlap with each other and with the computation. `migration`: with
        `options.migrate`, what the move has cost, why it has failed, or None if the text was complete before.

    Raises:
        SideFailed: A side failed.
    """
    with blocking.Registry() as registry:
        options = structs.replace(options, registry=registry.endpoint)
        with open_sides(options) as sides:
            ready, _ = sides.expect("prefill", "ready"), sides.expect("decode", "ready")
            sides.tell("prefill", room=ROOM)
            sides.tell("decode", room=ROOM)
            handover, moved = sides.expect("decode", "handover"), {}
            if options.migrate:
                sides.expect("second", "ready")
                sides.tell("decode")
                moved = sides.expect("decode", "moved")
            answer = moved if moved.get("is_complete") else sides.expect("second" if moved else "decode", "answer")
            if moved:
                sides.tell("decode")
                sides.tell("second")
            sides.tell("prefill")
            sent, last_chunk = sides.expect("prefill", "stages")["seconds"], sides.expect("prefill", "last_chunk_ready")
            reference = sides.expect("prefill", "reference")
    return {
        "identical": answer["tokens"] == reference["tokens"],
        **{name: getattr(options, name) for name in ("backend", "model", "prefill_tp", "decode_tp", "page_size")},
        "prompt_tokens": ready["prompt_tokens"],
        "tokens": len(answer["tokens"]),
        "bytes": handover["num_bytes"],
        "compute_ms": round(last_chunk["compute_s"] * 1e3, 3),
        "handover_ms": round((handover["at_s"] - last_chunk["at_s"]) * 1e3, 3),
        "stages_ms": {stage: round(max(sent[stage], handover["stages"][stage]) * 1e3, 3) for stage in sent},
        "text": answer["text"],
        **({"migration": _migration(moved, answer)} if moved else {}),
    }


def _migration(moved: Report, answer: Report) -> Report | None:
    """Return what the move of a request has cost: the gap between its tokens, and the median gap before; or None."""
    if moved["is_complete"]:
        return {"failed": moved["why"]} if moved["why"] else None
    return {
        "tokens_before": len(moved["tokens"]),
        "bytes": answer["num_bytes"],
        "gap_ms": round((answer["at_s"] - moved["at_s"]) * 1e3, 3),
        "usual_gap_ms": round(moved["gap_s"] * 1e3, 3),
    }


def print_result(result: Report, *, with_stages: bool = False) -> None:
    """Print the answer, what the handover cost and whether the tokens are right to standard output."""
    print(f"the decode side continues:\n\n{textwrap.indent(textwrap.fill(result['text'].strip(), 100), '    ')}\n")
    compute_ms, handover_ms = result["compute_ms"], result["handover_ms"]
    share = f"{handover_ms / compute_ms:.1%} of the time to compute the prompt"
    moved = "{bytes_mb:.1f} MB moved from {prefill_tp} to {decode_tp} ranks over {backend}"
    rows = {
        "prompt": f"{result['prompt_tokens']} tokens, computed in {compute_ms / 1e3:.2f} s",
        "cache": f"{moved.format(bytes_mb=result['bytes'] / 1e6, **result)}, while it was computed",
        "handover": f"decode started {handover_ms:.1f} ms after the last chunk: {share}",
    }
    if (migration := result.get("migration", {})) is None:
        rows["migration"] = "none: the text was complete before"
    elif "failed" in migration:
        rows["migration"] = f"none: the request has stayed where it was: {migration['failed']}"
    elif migration:
        where = "after {tokens_before} tokens; {mb:.1f} MB moved from {decode_tp} to {prefill_tp} ranks of other pages"
        rows["migration"] = where.format(mb=migration["bytes"] / 1e6, **(result | migration))
        rows["gap"] = "{gap_ms:.1f} ms between two tokens there; {usual_gap_ms:.1f} ms otherwise".format(**migration)
    if with_stages:
        rows["stages"] = "time in each; slowest rank; they overlap"
        rows |= {f"  {stage}": f"{time_ms:8.2f} ms" for stage, time_ms in result["stages_ms"].items()}
    print("\n".join(f"{name:11}  {text}" for name, text in rows.items()))
    verdict = "all {tokens} tokens are identical to" if result["identical"] else "the tokens differ from"
    print(f"\n{verdict.format_map(result)} those of a single process")
