"""How SGLang finds the adapter, alone and beside other plugins. Each test runs in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.keys import make_keys

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[3]
COMMANDS = re.search(r"```sh\n(.*?)```", (ROOT / "docs/sglang.md").read_text(), re.DOTALL)
PREPARE = """
import os, warnings
warnings.filterwarnings("ignore")
from benchmarks.embedded import sglang_shim
sglang_shim.install()
"""


def run(script: str) -> list[str]:
    """Run a script after the stubs, and return its last lines of output."""
    end = "\nprint(flush=True)\nos._exit(0)"  # SGLang's threads would keep the process alive
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


def test_prefill_starts_as_the_guide_says(tmp_path: Path) -> None:
    """The bootstrap server listens at the address that SGLang chooses, which other hosts can reach."""
    assert COMMANDS is not None
    keys = tmp_path / "keys"
    make_keys(keys)
    exported = re.findall(r"^export (\w+)='(.*)'$", COMMANDS[1].replace("/etc/kvflow", str(keys)), re.MULTILINE)
    assert exported
    found = run(f"""
os.environ.update({exported!r})
del os.environ["SGLANG_HOST_IP"]
from sglang.srt.plugins.hook_registry import HookRegistry
from kvflow.engines.sglang import plugin
plugin.activate()
HookRegistry.apply_hooks()
from tests.engines.sglang import sides
from tests.engines.sglang.processes import free_port
manager = sides.Side("prefill", "mha", free_port()).managers[0]
print("listens at", manager.rank.endpoint)
""")
    assert found[-3:-1] == ["listens", "at"]


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
