"""How SGLang finds the adapter, and what holds when there are other plugins. Each test has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[3]
PREPARE = """
import os, warnings
warnings.filterwarnings("ignore")
from benchmarks.embedded import sglang_shim
sglang_shim.install()
"""


def run(script: str) -> list[str]:
    """Run a script behind the stubs; returns what it prints last."""
    end = "\nprint(flush=True)\nos._exit(0)"  # SGLang's threads would go on
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PREPARE + script + end]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_sglang_finds_the_backend_by_itself() -> None:
    found = run("""
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
words = "--model-path x --disaggregation-mode prefill --disaggregation-transfer-backend kvflow".split()
print(parser.parse_args(words).disaggregation_transfer_backend)
""")
    assert found[-1] == "kvflow"


def test_pages_wait_for_a_proof_although_another_plugin_has_hooked_the_queue() -> None:
    found = run("""
import math
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from kvflow.engines.sglang import plugin
calls = []
plugin.activate()
HookRegistry.register(plugin.DEFER, lambda result, *_: calls.append(result), HookType.AFTER)
HookRegistry.apply_hooks()
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
get_kv_class(TransferBackend("kvflow"), KVClassType.MANAGER)
from kvflow.engines.sglang.ends import KvflowKVReceiver
queue = DecodeTransferQueue.__new__(DecodeTransferQueue)
queue._deferred_releases, queue.deferred_kv_release_timeout, queue.enable_host_receive = [], 30, False
class Receiver(KvflowKVReceiver):
    def __init__(self):
        self.abort_notified, self.bootstrap_infos = True, [1]
class Request:
    kv_receiver, metadata_buffer_index, host_staged = Receiver(), 3, False
queue._defer_release(Request())
print(queue._deferred_releases[-1][2], len(calls))
""")
    assert found[-2:] == ["inf", "1"]


@pytest.mark.parametrize(("version", "is_served"), [("0.5.23.post1", True), ("0.5.24", False), ("0.5.2", False)])
def test_other_versions_of_sglang_are_refused(version: str, is_served: bool) -> None:
    found = run(f"""
import importlib.metadata
known = importlib.metadata.version
importlib.metadata.version = lambda name: "{version}" if name == "sglang" else known(name)
from sglang.srt.plugins.hook_registry import HookRegistry
from kvflow import ConfigError
from kvflow.engines.sglang import plugin
plugin.activate()
HookRegistry.apply_hooks()
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
try:
    get_kv_class(TransferBackend("kvflow"), KVClassType.MANAGER)
except ConfigError as error:
    print("refused", error.values["found"])
else:
    print("served", "{version}")
""")
    assert found[-2:] == ["served" if is_served else "refused", version]
