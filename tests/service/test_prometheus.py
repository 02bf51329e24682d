"""A real Prometheus scrapes live ranks: it answers every query of the documents, of the dashboard and of the alerts."""

import json
import os
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

from kvflow.backends.memory import MemoryBackend
from kvflow.prometheus import RankCollector
from tests.support.failures import catch
from tests.support.instances import Deployment, deploy
from tests.support.ports import unused_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "deploy/grafana/kvflow.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
SYMPTOMS = ROOT / "docs/symptoms.md"
TOOLS = f"{os.environ['PATH']}:{ROOT}/.cache/prometheus/usr/bin"
"""Where scripts/unpack-package.sh puts them, or the machine has them."""

QUERY = re.compile(r"`([^`]*kvflow_[^`]*)`")
NAME = re.compile(r"kvflow_[a-z_]+")
COMPARED = re.compile(r" [<>] [0-9.]+$")
VARIABLES = {"$instance_name": ".*", "$__rate_interval": "1m"}

CONFIG = """
global: {{scrape_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs:
- job_name: kvflow
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus", path=TOOLS) is None, reason="scripts/unpack-package.sh gets it"),
]


def tool(name: str) -> str:
    """Return the path of a program of Prometheus."""
    found = shutil.which(name, path=TOOLS)
    assert found is not None
    return found


def questions() -> list[str]:
    """Return the queries of docs/metrics.md, without what they compare with."""
    found = QUERY.findall(PAGE.read_text().partition("\n## Questions\n")[2])
    return [COMPARED.sub("", query) for query in found if not NAME.fullmatch(query)]


def panels() -> list[str]:
    """Return the queries of the dashboard as Grafana sends them if every instance is chosen."""
    queries = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", ())
    ]
    for variable, value in VARIABLES.items():
        queries = [query.replace(variable, value) for query in queries]
    return queries


def sections() -> set[str]:
    """Return the anchors of docs/symptoms.md."""
    headings = [line for line in SYMPTOMS.read_text().splitlines() if line.startswith("## ")]
    return {heading.removeprefix("## ").lower().replace(" ", "-").replace(",", "") for heading in headings}


@asynccontextmanager
async def prometheus_of(port: int, folder: Path) -> AsyncIterator[str]:
    """Start a Prometheus that scrapes a port of this host, and return its address."""
    own = f"127.0.0.1:{unused_port()}"
    (folder / "prometheus.yml").write_text(CONFIG.format(port=port, alerts=ALERTS))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        command = [tool("prometheus"), *options, f"--web.listen-address={own}"]
        server = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - returns at once
    try:
        yield f"http://{own}"
    finally:
        server.terminate()
        await anyio.to_thread.run_sync(server.wait)


def fetch(url: str) -> Any:
    """Return the data of an answer; None while the server starts."""
    try:
        with urlopen(url, timeout=10) as answer:  # noqa: S310
            return json.load(answer)["data"]
    except URLError as error:
        if getattr(error, "code", None) == 400:
            raise
        return None


async def ask(address: str, query: str) -> list[Any]:
    """Return the answer to a query once it is not empty; the time limit of the test applies."""
    url = f"{address}/api/v1/query?{urlencode({'query': query})}"
    while not (found := await anyio.to_thread.run_sync(fetch, url)) or not found["result"]:  # noqa: ASYNC110
        await anyio.sleep(0.2)  # it scrapes by itself
    result: list[Any] = found["result"]
    return result


async def fail_a_write(deployment: Deployment, room: int) -> None:
    """Let a write fail, which both sides report."""
    deployment.faults[0].plan.append("fail")
    request = deployment.request(room, 8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, request.send)
        tasks.start_soon(catch, request.receive)


async def test_prometheus_answers_every_question_panel_and_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryBackend, "observed_paths", {"TCP": 1})  # it has none of its own
    port = unused_port()
    async with deploy() as deployment:
        deployment.prefill[0]._anomalies.count("late_notice")
        deployment.prefill[0]._anomalies.postpone("hello_over_budget")
        registry = CollectorRegistry()
        registry.register(RankCollector(*deployment.prefill, *deployment.decode))
        server, thread = start_http_server(port, "127.0.0.1", registry)
        async with prometheus_of(port, tmp_path) as address:
            await deployment.request(1, 8).hand_over()
            assert await ask(address, "kvflow_rooms")  # rates need a value before and one after
            await fail_a_write(deployment, room=2)
            await deployment.request(3, 8).hand_over()
            rules = (await anyio.to_thread.run_sync(fetch, f"{address}/api/v1/rules"))["groups"][0]["rules"]
            alerts = [COMPARED.sub("", rule["query"]) for rule in rules]
            assert (len(questions()) >= 5, len(panels()) >= 20, len(alerts) >= 5) == (True, True, True)
            for query in [*questions(), *panels(), *alerts]:
                assert await ask(address, query), query
            for rule in rules:
                page, _, section = rule["annotations"]["runbook"].partition(": ")[0].partition("#")
                assert (page, section in sections()) == ("docs/symptoms.md", True), rule["name"]
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
        done = await anyio.run_process(
            [tool("promtool"), "check", "metrics"], input=generate_latest(registry), check=False
        )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_promtool_accepts_the_alerts() -> None:
    done = await anyio.run_process([tool("promtool"), "check", "rules", str(ALERTS)], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
