"""Run a prefill server, a decode server and a router on this machine until interrupted."""

import argparse
import importlib
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from kvflow.cli.options import check_installed
from kvflow.cli.smollm2 import prepare_smollm2
from kvflow.cli.tasks import open_tasks
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.serve.server import Server

__all__ = ["add_arguments", "prepare"]

EXIT_SERVER_ENDED: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("engine", choices=["vllm"], help="inference engine")
    parser.add_argument("model", help="smollm2, a directory, or a model name that the engine knows")
    parser.add_argument("--host", default="127.0.0.1", help="host that the router listens on; the servers use loopback")
    parser.add_argument("--port", type=int, default=8000, help="router port; the servers use the next two")
    parser.add_argument(
        "--concurrent",
        action="store_true",
        help="use `kvflow proxy`, which asks prefill and decode at the same time, although vllm-router is installed",
    )
    parser.add_argument("--extra-config", metavar="JSON", help="settings of kvflow's connector, see docs/vllm.md")
    parser.add_argument(
        "--engine-arguments",
        default="",
        metavar="WORDS",
        help="extra arguments for both servers, as in --engine-arguments='--max-model-len 4096'",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIRECTORY", help="directory for the servers' logs; a new one by default"
    )


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that starts everything, and stops it on SIGINT or SIGTERM. Its exit code is 2 if a server ends.

    Raises:
        ConfigError: An option is invalid, or a package is missing.
    """
    if not 1 <= arguments.port <= 65_532:
        raise ConfigError("port is out of range", option="--port", value=arguments.port)
    extra = _extra_config(arguments.extra_config)
    words = _words(arguments.engine_arguments)
    check_installed("vllm", "aiohttp")
    logs = _directory(arguments.logs)
    model = str(prepare_smollm2()) if arguments.model == "smollm2" else arguments.model
    is_cpu = bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
    from kvflow.cli.serve import vllm  # noqa: PLC0415 - aiohttp may be missing

    servers = [
        vllm.vllm_server(options, logs)
        for options in vllm.pair(
            model=model,
            served_name=arguments.model,
            first_port=arguments.port + 1,
            extra_config=extra,
            arguments=words,
            is_cpu=is_cpu,
        )
    ]

    program = None if arguments.concurrent else shutil.which("vllm-router")
    if program is not None:
        servers.append(vllm.router(program, servers, arguments.host, arguments.port, logs))

    def serve() -> int:
        return anyio.run(_serve, servers, arguments)

    return serve


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            "option cannot be split into words", option="--engine-arguments", value=text, detail=str(error)
        ) from error


def _extra_config(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError("option is not valid JSON", option="--extra-config", value=text, detail=str(error)) from error
    if not isinstance(extra, dict):
        raise ConfigError("option must be a JSON object", option="--extra-config", value=text)
    return extra


def _directory(chosen: Path | None) -> Path:
    if chosen is None:
        return Path(tempfile.mkdtemp(prefix="kvflow-serve-"))
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "log directory cannot be created", option="--logs", value=str(chosen), detail=str(error)
        ) from error
    return chosen


async def _serve(servers: "list[Server]", arguments: argparse.Namespace) -> int:
    """Run until a signal arrives, or a server ends.

    Args:
        servers: Prefill, decode and perhaps a router, see `kvflow.cli.serve.server`.
        arguments: Arguments of the command.
    """
    from kvflow.cli.proxy.application import serve_proxy  # noqa: PLC0415 - aiohttp may be missing
    from kvflow.cli.serve.server import ServerFailed  # noqa: PLC0415 - as above

    prefill, decode = ([server.url] for server in servers[:2])
    try:
        async with open_tasks() as tasks, AsyncExitStack() as stack:
            url = servers[-1].url
            if len(servers) == 2:
                url = await stack.enter_async_context(serve_proxy(prefill, decode, arguments.host, arguments.port))
            watching = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(_stop_on_signal, tasks.cancel_scope)
            print("starting (takes a minute or more)", flush=True)
            for started in (servers[:2], servers[2:]):  # a router needs its servers
                for server in started:
                    server.start()
                    watching.start_soon(server.watch)
                    print(f"{server.name:8} {server.url}   log: {server.log}", flush=True)
                for server in started:
                    await server.wait_until_ready()
            print(f"ready: {url}\n\n{_curl(url, arguments.model)}\n", flush=True)
    except ServerFailed as failed:
        print(f"kvflow serve: {failed.message}: {failed.server.name}\n{failed.server.tail()}", file=sys.stderr)
        return EXIT_SERVER_ENDED
    finally:
        for server in reversed(servers):
            server.stop()
    return 0


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            print(f"kvflow serve: stopped by {received.name}", file=sys.stderr)
            scope.cancel()
            return


def _curl(url: str, model: str) -> str:
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
