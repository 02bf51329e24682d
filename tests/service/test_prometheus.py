"""A real Prometheus scrapes live ranks, and answers the questions of docs/metrics.md."""

import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from kvflow.prometheus import RankCollector
from tests.support.failures import catch
from tests.support.instances import deploy
from tests.support.ports import unused_port

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
QUERY = re.compile(r"`([^`]*kvflow_[^`]*)`")
NAME = re.compile(r"kvflow_[a-z_]+")
COMPARED = re.compile(r" [<>] [0-9]+$")

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: kvflow
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus"),
]


@asynccontextmanager
async def prometheus_of(port: int, folder: Path) -> AsyncIterator[str]:
    """Start a Prometheus that scrapes a port of this host, and return its address."""
    own = f"127.0.0.1:{unused_port()}"
    (folder / "prometheus.yml").write_text(CONFIG.format(port=port))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        command = ["prometheus", *options, f"--web.listen-address={own}"]
        server = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - returns at once
    try:
        yield f"http://{own}"
    finally:
        server.terminate()
        await anyio.to_thread.run_sync(server.wait)


async def ask(address: str, query: str) -> list[Any]:
    """Return the answer to a query once it is not empty; the time limit of the test applies."""

    def look() -> list[Any]:
        try:
            with urlopen(f"{address}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:  # noqa: S310
                found: list[Any] = json.load(answer)["data"]["result"]
        except URLError as error:
            if getattr(error, "code", None) == 400:
                raise
            return []  # it starts
        return found

    while not (found := await anyio.to_thread.run_sync(look)):  # noqa: ASYNC110 - it scrapes by itself
        await anyio.sleep(0.2)
    return found


async def test_prometheus_answers_the_questions_of_the_page(tmp_path: Path) -> None:
    port = unused_port()
    found = QUERY.findall(PAGE.read_text().partition("\n## Questions\n")[2])
    queries = [COMPARED.sub("", query) for query in found if not NAME.fullmatch(query)]
    assert len(queries) >= 5
    async with deploy() as deployment:
        registry = CollectorRegistry()
        registry.register(RankCollector(*deployment.prefill, *deployment.decode))
        server, thread = start_http_server(port, "127.0.0.1", registry)
        async with prometheus_of(port, tmp_path) as address:
            await deployment.request(1, 8).hand_over()
            deployment.faults[0].plan.append("fail")
            request = deployment.request(2, 8)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(catch, request.send)
                tasks.start_soon(catch, request.receive)
            for query in queries:
                assert await ask(address, query), query
            (failed,) = await ask(address, 'kvflow_failed_transfers_total{role="decode"} > 0')
            assert failed["metric"]["reason"] == "write_failed"
            assert (failed["metric"]["instance_name"], failed["value"][1]) == ("decode", "1")
        await anyio.to_thread.run_sync(server.shutdown)
        server.server_close()
        thread.join()


async def test_promtool_finds_nothing_wrong_with_what_is_exported() -> None:
    async with deploy() as deployment:
        registry = CollectorRegistry()
        registry.register(RankCollector(*deployment.prefill, *deployment.decode))
        done = await anyio.run_process(["promtool", "check", "metrics"], input=generate_latest(registry), check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
