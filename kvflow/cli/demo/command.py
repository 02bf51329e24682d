"""Move a real model's KV cache between two processes, and check that generation continues with the same tokens."""

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvflow import head_range
from kvflow.cli.demo.options import KV_HEADS, MODELS, DemoOptions
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.cli.smollm2 import prepare_smollm2
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]

MIGRATED_TOKENS = 24
"""Fewest tokens of a text that moves to another server in the middle."""

NEEDED = ("torch", "transformers", "gguf", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = DemoOptions()
    model = "smollm2, tiny (random weights: its text is noise), or the directory of a Llama model"
    parser.add_argument("--model", default=default.model, help=model)
    heads = "number of prefill ranks; must divide the model's KV heads (3 in smollm2 and tiny) or be a multiple of them"
    parser.add_argument("--prefill-tp", type=int, default=default.prefill_tp, metavar="N", help=heads)
    likewise = "number of decode ranks, likewise"
    parser.add_argument("--decode-tp", type=int, default=default.decode_tp, metavar="N", help=likewise)
    add_backend_option(parser, default.backend)
    parser.add_argument("--page-size", type=int, default=default.page_size, metavar="N", help="tokens in each page")
    parser.add_argument("--chunk", type=int, default=default.chunk, metavar="N", help="tokens in each chunk")
    parser.add_argument("--prompt", default=default.prompt, help="prompt (default: %(default).60s...)")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="tokens to generate")
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="seed of the shuffled page tables")
    log = "format of kvflow's log"
    parser.add_argument("--log", default=default.log, choices=["none", "console", "json"], help=log)
    moving = "move the request to a second decode server while it is answered"
    parser.add_argument("--migrate", action="store_true", help=moving)
    parser.add_argument("--stages", action="store_true", help="also print how long each stage of kvflow took")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--prepare", action="store_true", dest="prepare_model", help="unpack the model and exit")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the demo, and then 1 if tokens differ; raise KvflowError for invalid options."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        install = f"pip install 'kvflow[{'demo,nixl-cu12' if arguments.backend == 'nixl' else 'demo'}]'"
        raise ConfigError("demo requires packages that are not installed", missing=missing, install=install)
    if arguments.prepare_model:
        return _prepare_model
    options = _options(arguments)
    from kvflow.cli.demo.router import print_result, run_demo  # noqa: PLC0415 - needs kvflow's ranks

    if options.backend == "memory":
        import kvflow.cli.demo.ranks  # noqa: F401, PLC0415 - both sides run in this process

    def run() -> int:
        result = run_demo(options)
        if options.json:
            print(json.dumps(result))
        else:
            print_result(result, with_stages=options.stages)
        return 0 if result["identical"] else 1

    return run


def _options(arguments: argparse.Namespace) -> DemoOptions:
    check_positive(arguments, "prefill_tp", "decode_tp", "page_size", "chunk", "tokens")
    if not arguments.prompt:
        raise ConfigError("option must not be empty", option="--prompt")
    if arguments.model in MODELS:
        for num_ranks in (arguments.prefill_tp, arguments.decode_tp):
            head_range(KV_HEADS, num_ranks, 0)
    elif not Path(arguments.model, "config.json").is_file():
        raise ConfigError("no such model; pass smollm2, tiny, or a directory with config.json", model=arguments.model)
    check_backend(arguments.backend)
    if arguments.migrate and arguments.tokens < MIGRATED_TOKENS:
        raise ConfigError("a request needs more tokens to move", option="--tokens", minimum=MIGRATED_TOKENS)
    if arguments.model == "smollm2":
        prepare_smollm2()  # once, and not on both sides
    return msgspec.convert(vars(arguments), DemoOptions)


def _prepare_model() -> int:
    prepare_smollm2()
    return 0
