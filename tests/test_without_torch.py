"""kvflow works without torch, and its commands without aiohttp: checked in fresh interpreters that refuse both."""

import subprocess
import sys
from typing import Final

import pytest

WITHOUT_TORCH: Final = """
import sys
from importlib.abc import MetaPathFinder

class NoTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torch", "aiohttp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""

EVERY_PUBLIC_NAME: Final = """
import kvflow, kvflow.blocking, kvflow.geometry
for name in kvflow.__all__:
    getattr(kvflow, name)
"""

HELP: Final = """
from contextlib import suppress
from kvflow.cli.main import main
for command in ([], ["registry"], ["demo"], ["serve"], ["proxy"]):
    with suppress(SystemExit):
        main([*command, "--help"])
"""

TRANSFER: Final = """
import asyncio
import numpy as np
import kvflow
from kvflow.geometry import BufferLists, Component, PagePart, layout_from_pointers, regions_from_pointers

NUM_PAGES, PAGE_SIZE, HEADS, HEAD_BYTES = 4, 2, 2, 8
PAGE_BYTES = PAGE_SIZE * HEADS * HEAD_BYTES

def describe(pool):
    pools = {"latent": [pool.reshape(NUM_PAGES, PAGE_SIZE, HEADS, HEAD_BYTES)]}
    return kvflow.layout_from_tensors(pools, axes="page token head dim", heads=(0, HEADS), fingerprint="model")

def describe_by_pointers(pool):
    buffers = BufferLists([pool.ctypes.data], [pool.nbytes], [PAGE_BYTES])
    part = PagePart("latent", HEAD_BYTES, "uint8", (0, HEADS))
    regions = regions_from_pointers(buffers, [[part]], page_size=PAGE_SIZE, layers=[0])
    return layout_from_pointers([Component("kv", regions)], "model", buffers=[buffers])

async def main():
    source = np.arange(NUM_PAGES * PAGE_BYTES, dtype=np.uint8).reshape(NUM_PAGES, PAGE_BYTES)
    target = np.full_like(source, 255)
    async with kvflow.Registry("tcp://127.0.0.1:0") as registry:
        ranks = dict(registry=registry.endpoint, engine_rank=0, num_ranks=1, backend="memory")
        prefill = kvflow.PrefillRank(kvflow.PrefillConfig(instance="prefill", **ranks), describe(source))
        decode = kvflow.DecodeRank(kvflow.DecodeConfig(instance="decode", **ranks), describe_by_pointers(target))
        async with prefill, decode, prefill.send(room=1) as sender:
            async with decode.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [3, 0]}) as receiver:
                await sender.finish((0, 4), {"kv": [1, 2]})
                await receiver.done()
    assert (target[[3, 0]] == source[[1, 2]]).all()
    assert (target[[1, 2]] == 255).all()

asyncio.run(main())
"""


def run_without_torch(program: str) -> "subprocess.CompletedProcess[str]":
    script = WITHOUT_TORCH + program
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "program", [EVERY_PUBLIC_NAME, TRANSFER], ids=["every public name resolves", "numpy pools are transferred"]
)
def test_program_runs(program: str) -> None:
    done = run_without_torch(program)
    assert done.returncode == 0, done.stderr


def test_commands_explain_themselves() -> None:
    done = run_without_torch(HELP)
    assert done.returncode == 0, done.stderr
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert [usage.split()[2] for usage in usages[1:]] == ["registry", "demo", "serve", "proxy"]


@pytest.mark.parametrize("package", ["torch", "aiohttp"])
def test_package_is_refused(package: str) -> None:
    """Otherwise the other tests would prove nothing."""
    done = run_without_torch(f"import {package}")
    assert done.returncode != 0
    assert f"No module named '{package}'" in done.stderr
