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
        `tokens`: how many decode generated. `goodput_gbps`: bytes written into decode pages, in Gbit/s, over the time
        for which the slowest prefill rank had writes in flight. `handover_ms`: from "last chunk ready on prefill" to
        "decode may run". `stages_ms`: for each stage, the longest time that a rank spent in it.

    Raises:
        SideFailed: A side failed.
    """
    with blocking.Registry() as registry:
        options = structs.replace(options, registry=registry.endpoint)
        with open_sides(options) as sides:
            ready, _ = sides.expect("prefill", "ready"), sides.expect("decode", "ready")
            sides.tell("prefill", room=ROOM)
            sides.tell("decode", room=ROOM)
            handover, answer = sides.expect("decode", "handover"), sides.expect("decode", "answer")
            sides.tell("prefill")
            sent, last_chunk = sides.expect("prefill", "stages")["seconds"], sides.expect("prefill", "last_chunk_ready")
            reference = sides.expect("prefill", "reference")
    return {
        "identical": answer["tokens"] == reference["tokens"],
        **{name: getattr(options, name) for name in ("backend", "model", "prefill_tp", "decode_tp", "page_size")},
        "prompt_tokens": ready["prompt_tokens"],
        "tokens": len(answer["tokens"]),
        "bytes": handover["num_bytes"],
        "goodput_gbps": round(handover["num_bytes"] * 8 / 1e9 / sent["submit"], 6),
        "handover_ms": round((handover["at_s"] - last_chunk["at_s"]) * 1e3, 3),
        "stages_ms": {stage: round(max(sent[stage], handover["stages"][stage]) * 1e3, 3) for stage in sent},
        "text": answer["text"],
    }


def print_result(result: Report) -> None:
    """Print the answer, the figures and the result of the comparison to standard output."""
    print(f"output of the decode side:\n{textwrap.indent(textwrap.fill(result['text'].strip(), 100), '    ')}\n")
    rows = {
        "prefill -> decode": "{prefill_tp} -> {decode_tp} ranks over {backend}".format_map(result),
        "cache moved": f"{result['prompt_tokens']} tokens, {result['bytes'] / 1e6:.2f} MB",
        "throughput": f"{result['goodput_gbps'] / 8:.2f} GB/s during writes",
        "handover": f"{result['handover_ms']:.1f} ms from the last chunk to the start of decoding",
        "time in each stage": "(slowest rank; stages overlap)",
        **{f"  {stage}": f"{time_ms:8.2f} ms" for stage, time_ms in result["stages_ms"].items()},
    }
    print("\n".join(f"{name:18}  {text}" for name, text in rows.items()))
    verdict = "identical: all {tokens} tokens match" if result["identical"] else "different: the tokens do not match"
    print(f"{verdict.format_map(result)} a single-process run")
