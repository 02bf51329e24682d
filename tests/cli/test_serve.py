"""Servers as child processes, and the command that starts them, without an engine."""

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import aiohttp
import anyio
import pytest

import kvflow
from kvflow.cli.main import main
from kvflow.cli.serve.command import deployed
from kvflow.cli.serve.server import Server, ServerFailed
from kvflow.cli.serve.vllm import halves_of_cpus, pair, router, vllm_server
from kvflow.errors import ConfigError
from tests.support.ports import unused_port

pytestmark = pytest.mark.anyio

HEALTHY = """
import http.server, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fine")

    def log_message(self, *_):
        pass

print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

STARTED_BY_ANOTHER = """
import sys
from contextlib import suppress
from pathlib import Path
from kvflow.cli.serve.server import Server

server = Server("example", [sys.executable, "-c", "import time; time.sleep(600)"], {}, url="", log=Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
"""

KILLED_WHILE_ITS_SERVER_RUNS = """
import os, signal, sys
from pathlib import Path
import anyio
from kvflow.cli.serve.server import Server

server = Server("example", [sys.executable, "-c", sys.argv[2], sys.argv[4]], {}, url=sys.argv[3], log=Path(sys.argv[1]))
server.start()
anyio.run(server.wait_until_ready)
os.kill(os.getpid(), signal.SIGKILL)
"""


def server_of(script: str, place: Path, name: str = "example") -> Server:
    port = unused_port()
    command = [sys.executable, "-c", script, str(port)]
    return Server(name, command, {}, url=f"http://127.0.0.1:{port}", log=place / f"{name}.log")


async def until_ended(process: int) -> None:
    """Wait until a process is gone, or is a zombie."""
    place = anyio.Path(f"/proc/{process}/stat")
    with anyio.fail_after(20), suppress(FileNotFoundError, ProcessLookupError):
        while True:
            if (await place.read_text()).rpartition(")")[2].split()[0] == "Z":
                return
            await anyio.sleep(0.01)


async def test_a_server_is_killed_with_all_its_processes_and_can_be_started_again(tmp_path: Path) -> None:
    server = server_of(HEALTHY, tmp_path)
    assert server.has_ended()
    for _ in range(2):
        server.start()
        await server.wait_until_ready(40)
        assert not server.has_ended()
        server.kill()
        assert server.has_ended()
        await until_ended(int(server.log.read_text().split()[-1]))
    server.stop()  # without effect


async def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    server = server_of("raise SystemExit('no such model')", tmp_path)
    server.start()
    with pytest.raises(ServerFailed, match="has ended") as failed:
        await server.wait_until_ready(40)
    assert failed.value.server is server
    assert server.tail() == "no such model"
    with pytest.raises(ServerFailed, match="has ended"):
        await server.watch()


async def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = server_of("import time; time.sleep(600)", tmp_path)
    server.start()
    with pytest.raises(ServerFailed, match="not ready in time"):
        await server.wait_until_ready(0.0)
    server.stop()
    assert server.has_ended()


async def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTED_BY_ANOTHER, str(tmp_path / "log")]
    finished = await anyio.run_process(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    await until_ended(int(finished.stdout))


async def test_no_process_of_a_server_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """The workers of vLLM keep running when its server is killed."""
    log, port = tmp_path / "log", unused_port()
    script = [
        sys.executable,
        "-c",
        KILLED_WHILE_ITS_SERVER_RUNS,
        str(log),
        HEALTHY,
        f"http://127.0.0.1:{port}",
        str(port),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = await anyio.run_process(script, check=False, env=environment)
    assert finished.returncode == -signal.SIGKILL
    await until_ended(int(log.read_text().split()[-1]))


async def test_a_deployment_is_ready_behind_the_proxy_and_ends_with_a_server(tmp_path: Path) -> None:
    servers = [server_of(HEALTHY, tmp_path, "prefill"), server_of(HEALTHY, tmp_path, "decode")]
    proxy = router(servers, "127.0.0.1", unused_port(), tmp_path, is_concurrent=True)

    async def serve() -> None:
        async with deployed(servers, proxy, "m") as told, aiohttp.ClientSession() as client:
            with pytest.raises(ConfigError, match="cannot be bound"):
                await deployed([], proxy, "m").__aenter__()
            assert told.startswith(f"ready: {proxy.url}\n\ncurl {proxy.url}/v1/completions ")
            async with client.get(f"{proxy.url}/health") as answer:
                assert answer.status == 200
            servers[1].kill()
            await anyio.sleep_forever()

    with anyio.fail_after(80), pytest.raises(ServerFailed, match="has ended") as failed:
        await serve()
    assert failed.value.server is servers[1]
    assert servers[1].log.read_text().strip() in str(failed.value)
    assert all(server.has_ended() for server in (*servers, proxy))


def test_a_pair_shares_the_cpus_and_nothing_else(tmp_path: Path) -> None:
    described = pair(
        model="/m", served_name="m", first_port=8001, extra_config={"port": 1}, arguments=("--x",), is_cpu=True
    )
    assert tuple(one.cpus for one in described) == halves_of_cpus()
    prefill, decode = (vllm_server(one, tmp_path) for one in described)
    assert (prefill.url, decode.url) == ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    assert prefill.log != decode.log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "0"], "port is out of range"),
        (["--port", "65535"], "port is out of range"),
        (["--extra-config", "{"], "option is not valid JSON"),
        (["--extra-config", "[]"], "option must be a JSON object"),
        (["--engine-arguments='"], "option cannot be split into words"),
        ([], "command requires packages that are not installed"),  # vLLM is not installed here
    ],
)
def test_command_says_what_is_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vllm", "m", *words]) == 2
    assert capsys.readouterr().err.startswith(f"kvflow serve: {said} (")


def test_vllm_is_installed_in_the_version_that_the_connector_supports(capsys: pytest.CaptureFixture[str]) -> None:
    connector = Path(kvflow.__path__[0], "engines/vllm/connector.py").read_text()  # which only vLLM can import
    (supported,) = re.findall(r'SUPPORTED: Final = "(.*)"', connector)
    assert main(["serve", "vllm", "m"]) == 2
    assert re.search(rf"install='pip install vllm=={re.escape(supported)}\.\d+'", capsys.readouterr().err)
