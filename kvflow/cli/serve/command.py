"""Run a prefill server, a decode server and a router on this machine until interrupted."""

import argparse
import asyncio
import importlib
import json
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvflow.cli.options import check_installed
from kvflow.cli.smollm2 import prepare_smollm2
from kvflow.cli.tasks import open_tasks, serving
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from kvflow.cli.serve.server import Server

__all__ = ["add_arguments", "prepare"]

VLLM: Final = "vllm==0.32.0"
"""What the connector supports, see docs/vllm.md."""


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
    """Return a function that starts everything, and stops it on SIGINT or SIGTERM. It fails if a server ends.

    Raises:
        ConfigError: An option is invalid, or a package is missing.
    """
    if not 1 <= arguments.port <= 65_532:
        raise ConfigError("port is out of range", option="--port", value=arguments.port)
    extra = _extra_config(arguments.extra_config)
    words = _words(arguments.engine_arguments)
    check_installed(VLLM, "aiohttp")
    logs = _directory(arguments.logs)
    model = str(prepare_smollm2()) if arguments.model == "smollm2" else arguments.model
    is_cpu = bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
    from kvflow.cli.serve import vllm  # noqa: PLC0415 - aiohttp may be missing

    first = arguments.port + 1
    described = vllm.pair(
        model=model, served_name=arguments.model, first_port=first, extra_config=extra, arguments=words, is_cpu=is_cpu
    )
    servers = [vllm.vllm_server(options, logs) for options in described]
    router = vllm.router(servers, arguments.host, arguments.port, logs, is_concurrent=arguments.concurrent)
    return serving("kvflow serve", deployed(servers, router, arguments.model))


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


async def _check_free(url: str) -> None:
    address = urlsplit(url)
    try:
        listener = await asyncio.start_server(lambda *_: None, address.hostname, address.port)
    except OSError as error:
        raise ConfigError("address cannot be bound", url=url, detail=error.strerror) from error
    listener.close()


@asynccontextmanager
async def deployed(servers: "Sequence[Server]", router: "Server", model: str) -> AsyncIterator[str]:
    """Start prefill and decode, then the router; stop them at the end. Yields what to tell a person once all are ready.

    Raises:
        ConfigError: The router's address cannot be bound.
        ServerFailed: One of them has ended, or was not ready in time; at any moment in the block.
    """
    await _check_free(router.url)  # before servers take minutes to start
    try:
        async with open_tasks() as tasks:
            print("starting (takes a minute or more)", flush=True)
            for started in (servers, [router]):  # a router needs its servers
                for server in started:
                    server.start()
                    tasks.start_soon(server.watch)
                    print(f"{server.name:8} {server.url}   log: {server.log}", flush=True)
                for server in started:
                    await server.wait_until_ready()
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
            curl = f"curl {router.url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
            yield f"ready: {router.url}\n\n{curl}\n"
    finally:
        for server in (router, *reversed(servers)):
            server.stop()
