"""Benchmarks of kvflow: `python -m benchmarks NAME OPTIONS`."""

import sys
from collections.abc import Callable
from typing import Final

from kvflow.cli.main import run_quietly

NAMES: Final = {
    "handover": "latency, rate and CPU time of small requests, compared with the bare transport",
    "transfer": "throughput of one transfer at a time, compared with the bare transport",
    "embedded": "handovers between engines, and what calls cost their scheduler",
    "vllm_handover": "vLLM servers with kvflow's connector and with vLLM's own: handovers, first tokens, equal texts",
    "vllm_turns": "conversations between vLLM servers: what prefill computes and receives of each turn",
    "vllm_moves": "requests that move between vLLM servers while they are answered: pause, cost, draining",
    "vllm_replaced": "vLLM servers that are killed and replaced at the same addresses, beside vLLM's own connector",
    "sglang_transfer": "kvflow behind SGLang's interfaces, and SGLang's own NIXL backend: requests, CPU, calls",
    "hetero": "sides that keep the cache differently: direct, packed, and what is chosen",
    "scale": "cost and memory of a transfer among many, and with many peers",
    "keys": "small requests and connections with keys and without",
    "attack": "what attacks on the control port leave of the work",
    "offers": "warm-ups and moves of requests beside live ones, drains by moves, changes of role",
    "idle": "CPU of connected ranks with nothing to do",
    "failures": "processes that die, freeze or give up in the middle of a transfer",
    "limits": "cost of each limit at a quarter, a half and the whole of it, and how long it holds the event loop",
    "plan": "time and memory of planning, and of compiling routes",
    "digest": "what digests cost a transfer",
    "path": "functions that a chunk and a notice run through",
    "shape": "lines, files, and lengths of functions and classes",
    "plot": "draw rows that were printed with --json",
}
"""Modules with `add_arguments(parser)` and `prepare(arguments)`, which returns a function that runs the benchmark."""


def main(words: list[str]) -> int:
    """Run a benchmark, and return the exit code."""
    return run_quietly(" ".join(["benchmarks", *words[:1]]), lambda: _prepare(words))


def _prepare(words: list[str]) -> Callable[[], int]:
    import argparse  # noqa: PLC0415 - from here on, an interrupt prints no traceback
    from importlib import import_module  # noqa: PLC0415

    name = words[0] if words and words[0] in NAMES else ""
    if not name:
        parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
        commands = parser.add_subparsers(required=True, metavar="NAME")
        for other, text in NAMES.items():
            commands.add_parser(other, help=text)
        parser.parse_args(words)  # prints the help or an error, and exits
    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, and nothing else")
    work: Callable[[], int] = module.prepare(parser.parse_args(words[1:]))
    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
