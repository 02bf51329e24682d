"""Move a real model's KV cache between two processes, and check that generation continues with the same tokens."""

import argparse
import importlib.util
import sys
from collections.abc import Callable

import anyio
import msgspec

from kvflow.cli.demo.options import DemoOptions, check_model, check_tp
from kvflow.cli.options import add_backend_option, check_backend, check_positive
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "prepare"]

NEEDED = ("torch", "transformers", "gguf", "accelerate", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = DemoOptions()
    parser.add_argument(
        "--model", default=default.model, help="smollm2, tiny (random weights: its text is noise), or a directory"
    )
    engine = "use an engine adapter; `transformers` hands a request over between two managers"
    parser.add_argument("--engine", default=default.engine, choices=["none", "transformers"], help=engine)
    heads = "number of prefill ranks; must divide the model's KV heads (3 in smollm2 and tiny) or be a multiple of them"
    parser.add_argument("--prefill-tp", type=int, metavar="N", help=heads)
    parser.add_argument("--decode-tp", type=int, metavar="N", help="number of decode ranks, likewise")
    add_backend_option(parser, default.backend)
    parser.add_argument("--page-size", type=int, default=default.page_size, metavar="N", help="tokens in each page")
    parser.add_argument("--chunk", type=int, default=default.chunk_tokens, metavar="N", help="tokens in each chunk")
    parser.add_argument("--prompt", default=default.prompt, help="prompt (default: %(default).60s...)")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="tokens to generate")
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="seed of the shuffled page tables")
    parser.add_argument(
        "--log", default=default.log, choices=["none", "console", "json"], help="format of kvflow's log"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--prepare", action="store_true", dest="prepare_model", help="unpack the model and exit")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Load the demo, which takes seconds, and return a function that runs it; that returns 1 if tokens differ.

    Raises:
        ConfigError: An option is invalid, or a package is missing.
    """
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        extras = "demo,nixl-cu12" if arguments.backend == "nixl" else "demo"
        install = f"pip install 'kvflow[{extras}]'"
        raise ConfigError("demo requires packages that are not installed", missing=missing, install=install)
    if arguments.prepare_model:
        return _prepare_model
    options = _options(arguments)
    from kvflow.cli.demo.coordinator import run_demo  # noqa: PLC0415 - slow to import
    from kvflow.cli.demo.display import ProgressDisplay, print_result  # noqa: PLC0415 - as above

    if options.backend == "memory":  # both sides run in this process
        import kvflow.cli.demo.workers  # noqa: F401, PLC0415 - as above

    def run() -> int:
        if arguments.json:
            result = anyio.run(run_demo, options, lambda _side, _report: None)
            print(msgspec.json.encode(result).decode())
        else:
            with ProgressDisplay(options) as display:
                result = anyio.run(run_demo, options, display.show)
            print_result(result)
        return 0 if result.identical else 1

    return run


def _prepare_model() -> int:
    from kvflow.cli.demo.models import prepare_smollm2  # noqa: PLC0415 - slow to import

    prepare_smollm2(lambda text: print(text, file=sys.stderr))
    return 0


def _options(arguments: argparse.Namespace) -> DemoOptions:
    _choose_ranks(arguments)
    check_positive(arguments, "prefill_tp", "decode_tp", "page_size", "chunk", "tokens")
    if not arguments.prompt:
        raise ConfigError("option must not be empty", option="--prompt")
    kv_heads = check_model(arguments.model)
    check_tp("--prefill-tp", arguments.prefill_tp, kv_heads)
    check_tp("--decode-tp", arguments.decode_tp, kv_heads)
    return DemoOptions(
        engine=arguments.engine,
        model=arguments.model,
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        backend=check_backend(arguments.backend),
        page_size=arguments.page_size,
        chunk_tokens=arguments.chunk,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        seed=arguments.seed,
        log=arguments.log,
    )


def _choose_ranks(arguments: argparse.Namespace) -> None:
    """Fill in the numbers of ranks; managers have one.

    Raises:
        ConfigError: More ranks were requested for managers.
    """
    default = DemoOptions()
    for option, ranks in (("prefill_tp", default.prefill_tp), ("decode_tp", default.decode_tp)):
        chosen = getattr(arguments, option)
        if arguments.engine != "none" and chosen not in (None, 1):
            raise ConfigError(
                "--engine transformers supports one rank on each side only", option=f"--{option.replace('_', '-')}"
            )
        if chosen is None:
            setattr(arguments, option, ranks if arguments.engine == "none" else 1)
