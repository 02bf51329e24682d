"""The manifests in deploy/kubernetes fit Kubernetes, kvflow and each other, as far as can be seen without a cluster."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import numpy as np
import pytest

import kvflow
from kvflow import Outcome
from kvflow.addresses import DirectoryURL
from kvflow.cli import main as cli
from kvflow.directory.kubernetes import PORT, KubernetesDirectory
from kvflow.engines.vllm.dialect import Reference
from kvflow.engines.vllm.metadata import GroupBlocks
from kvflow.engines.vllm.options import Options, read_options
from kvflow.engines.vllm.ranks import Place, open_ranks
from tests.directory.systems import Kubernetes, opened, watched
from tests.engines.test_vllm_adapter import BLOCK, BLOCKS, CONTENT, HEADS, LAYERS, describe
from tests.support.commands import check_arguments
from tests.support.manifests import MANIFESTS, SERVERS, Server, read_objects
from tests.support.waiting import until
from tests.test_platforms import extras

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/platforms/kubernetes.md").read_text()
VARIANTS = ("base", "lws", "rdma")
WRITTEN = [
    one
    for file in sorted(MANIFESTS.glob("*/*.yaml"))
    if file.stem != "kustomization"
    for one in read_objects(file.read_text())
]
EVERY_PORT = {"port": 1, "endPort": 65_535}
LEADER = "leaderworkerset.sigs.k8s.io/worker-index"

NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="builds the variants")
BY_SERVER = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.file)


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in WRITTEN if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def role_of(server: Server) -> str:
    return str(server.template["metadata"]["labels"]["kvflow.io/role"])


def check_object(one: dict[str, Any]) -> None:
    """Validate an object, and of a LeaderWorkerSet, whose schema is not Kubernetes' own, the template of its pods."""
    if one["kind"] == "LeaderWorkerSet":
        assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert one["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
        assert one["spec"]["leaderWorkerTemplate"].keys() == {"size", "restartPolicy", "workerTemplate"}
        template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        one = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": one["metadata"], "template": template}
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


# Kubernetes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", WRITTEN, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_objects_are_valid(one: dict[str, Any]) -> None:
    check_object(one)


@NEEDS_KUBECTL
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_built(variant: str) -> None:
    command = ["kubectl", "kustomize", str(MANIFESTS / variant)]
    built = read_objects(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for one in built:
        check_object(one)
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in built}
    makers = {key for key in by_name if key[0] in {"Deployment", "LeaderWorkerSet"}}
    prefill = ("LeaderWorkerSet", "prefill-hosts") if variant == "lws" else ("Deployment", "prefill")
    assert makers == {prefill, ("Deployment", "decode")}
    service = by_name["Service", "prefill"]
    assert (LEADER in service["spec"]["selector"]) == (variant == "lws")  # workers do not answer for the instance
    text = json.dumps(built)
    assert text.count('"add": ["IPC_LOCK"]') == text.count('"rdma/hca"') == {"base": 0, "lws": 1, "rdma": 2}[variant]


def test_every_selector_selects_servers() -> None:
    labels = [server.template["metadata"]["labels"] for server in SERVERS]
    selected = [
        spec[key].get("matchLabels", spec[key])
        for one in WRITTEN
        for spec in [one.get("spec", {})]
        for key in ("selector", "podSelector")
        if key in spec
    ]
    assert len(selected) == 8
    assert all(one in labels for one in selected)


@BY_SERVER
def test_names_in_pods_exist(server: Server) -> None:
    container, pod = server.container, server.pod
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in named("Service", role_of(server))["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert all(f"create secret generic {name} " in PAGE for name in secrets)
    assert named("ConfigMap", container["envFrom"][0]["configMapRef"]["name"])["data"].keys() == {"MODEL"}


def test_set_has_another_name_than_services() -> None:
    """The controller of LeaderWorkerSets uses a service of its name, in which a leader is found before it is ready."""
    names, services = (
        {one["metadata"]["name"] for one in WRITTEN if one["kind"] == kind} for kind in ("LeaderWorkerSet", "Service")
    )
    assert names
    assert not names & services


@BY_SERVER
def test_pods_have_time_to_end(server: Server) -> None:
    """Before a pod is killed, routers notice, transfers finish, and vLLM ends what has begun."""
    waits = [int(found) for found in re.findall(r"--(?:notice|wait) (\d+)", " ".join(server.commands[-1]))]
    (last,) = [int(found) for found in re.findall(r"--shutdown-timeout=(\d+)", " ".join(server.container["args"]))]
    assert len(waits) == 2
    assert sum(waits) + last + 15 <= server.pod["terminationGracePeriodSeconds"]


@pytest.mark.anyio
async def test_role_permits_what_a_directory_asks_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = named("Role", "kvflow-directory")["rules"]
    permitted = {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    async with opened("kubernetes", tmp_path, monkeypatch) as system:
        assert isinstance(system, Kubernetes)
        async with watched(KubernetesDirectory(DirectoryURL.parse("registry", system.url))):
            await until(lambda: system.api.num_watches)
        assert system.api.asked == permitted
    binding = named("RoleBinding", "kvflow-directory")
    assert binding["roleRef"]["name"] == "kvflow-directory"
    accounts = {subject["name"] for subject in binding["subjects"]}
    assert accounts == {named("ServiceAccount", "kvflow-decode")["metadata"]["name"]}
    for server in SERVERS:  # only decode asks Kubernetes; the others have no token
        found = server.pod.get("serviceAccountName"), server.pod.get("automountServiceAccountToken", True)
        assert found == (("kvflow-decode", True) if role_of(server) == "decode" else (None, False))


# kvflow and vLLM ------------------------------------------------------------------------------------------------------


@BY_SERVER
def test_commands_exist(server: Server) -> None:
    scripts = [command[-1] if command[0] == "sh" else shlex.join(command) for command in server.commands]
    found = [re.findall(r"kvflow [\w -]+", script) for script in scripts]
    assert all(found)
    for command in (command for commands in found for command in commands):
        check_arguments(cli.main, command.split()[1:])


@BY_SERVER
def test_options_are_those_of_the_connector(server: Server) -> None:
    transfer = server.read_transfer(POD_NAMESPACE="inference")
    options = read_options(transfer["kv_connector_extra_config"])
    mounts = {mount["name"]: mount["mountPath"] for mount in server.container["volumeMounts"]}
    ports = {port["name"]: port["containerPort"] for port in server.container["ports"]}
    assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role_of(server)]
    assert transfer["kv_connector_module_path"] == "kvflow.engines.vllm.connector"
    assert (ROOT / "kvflow/engines/vllm/connector.py").exists()
    assert (options.host, options.keys) == ("the-pod_ip", mounts["keys"])
    assert options.port == ports.get(PORT, 0)
    assert (PORT in ports) == (role_of(server) == "prefill")
    if role_of(server) == "decode":
        service = DirectoryURL.parse("registry", str(options.registry)).path
        assert PORT in [port["name"] for port in named("Service", service)["spec"]["ports"]]


def test_instances_are_named_like_the_pods_that_answer_for_them() -> None:
    """That is how a directory finds them: a set calls the first pod of a group by the names of both."""
    fields = {}
    for server in SERVERS:
        (name,) = re.findall(r'"engine_id": "([^"]+)"', server.container["args"][-1])
        entries = {entry["name"]: entry for entry in server.container["env"]}
        parts = re.findall(r"\$\((\w+)\)", name)
        fields[server.file] = [entries[part]["valueFrom"]["fieldRef"]["fieldPath"] for part in parts]
    label = "metadata.labels['leaderworkerset.sigs.k8s.io/{}']".format
    assert fields == {
        "base/decode": ["metadata.name"],
        "base/prefill": ["metadata.name"],
        "lws/prefill": [label("name"), label("group-index")],
    }


def test_images_have_the_version_of_vllm_that_is_supported() -> None:
    code = (ROOT / "kvflow/engines/vllm/connector.py").read_text()
    (version,) = re.findall(r'^SUPPORTED: Final = "(.+)"', code, re.MULTILINE)
    recipe = (MANIFESTS / "Dockerfile").read_text()
    tags = [server.container["image"].rpartition(":")[2] for server in SERVERS]
    tags += re.findall(r"^FROM .*:v(.+)", recipe, re.MULTILINE)
    assert len(set(tags)) == 1
    assert tags[0].startswith(f"{version}.")
    (named_extras,) = re.findall(r"/src\[([\w,-]+)\]", recipe)
    assert set(named_extras.split(",")) <= extras()


@pytest.mark.parametrize(("index", "is_headless"), [("0", False), ("1", True)])
def test_only_the_first_pod_of_a_group_serves_http(tmp_path: Path, index: str, *, is_headless: bool) -> None:
    (server,) = [server for server in SERVERS if server.kind == "LeaderWorkerSet"]
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    command = [*server.container["command"], *server.expand_arguments()]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LWS_WORKER_INDEX": index}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["serve", *server.expand_arguments(), *["--headless"] * is_headless]


# Keys -----------------------------------------------------------------------------------------------------------------


def mount_secret(source: Path, target: Path) -> None:
    """Lay files out as kubelet does: links to the latest of several folders, in one to which everybody may write."""
    (target / "..1").mkdir(parents=True)
    for file in source.iterdir():
        (target / "..1" / file.name).write_bytes(file.read_bytes())
        (target / "..1" / file.name).chmod(0o400)
        (target / file.name).symlink_to(Path("..data") / file.name)
    (target / "..data").symlink_to("..1")
    target.chmod(0o1777)


def test_servers_with_the_keys_of_the_page_move_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is down, which stops nothing."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (script,) = re.findall(r"```sh\n(kvflow keys new.*?)```", PAGE, re.DOTALL)
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-e", "-c", script], check=True, cwd=tmp_path, env={"PATH": tools})
    mounted = {role: tmp_path / "mounted" / role for role in ("prefill", "decode")}
    for role, place in mounted.items():
        mount_secret(tmp_path / "keys" / role, place)
    assert {peer.instance for peer in kvflow.load_trust(mounted["prefill"]).peers} == {"prefill-*", "decode-*"}
    caches = describe(list(np.zeros((LAYERS, BLOCKS, HEADS, BLOCK, CONTENT), np.uint8)))

    def adapt(server: Server, name: str) -> tuple[Options, Place]:
        transfer = server.read_transfer(POD_NAME=name, POD_IP="127.0.0.1", POD_NAMESPACE="inference")
        options = read_options(transfer["kv_connector_extra_config"])
        is_prefill = role_of(server) == "prefill"
        place = Place(transfer["engine_id"], 0, 1, is_prefill, not is_prefill, str)
        return msgspec.structs.replace(options, keys=str(mounted[role_of(server)])), place

    by_file = {server.file: server for server in SERVERS}
    with ExitStack() as stack:
        source = open_ranks(*adapt(by_file["base/prefill"], "prefill-5b7f9-x2x7k"), caches.layout)
        stack.callback(source.close)
        target = open_ranks(*adapt(by_file["base/decode"], "decode-6c8d4-k9z2p"), caches.layout)
        stack.callback(target.close)
        sender = source.send("room", "request")
        assert source.ticket is not None
        ticket = kvflow.ticket_for_room(source.ticket, "room", kvflow.load_trust(mounted["prefill"]))
        receiver = target.announce(Reference(ticket, None, None), "request")
        receiver.grant(tokens=(0, BLOCK), pages=caches.pages([GroupBlocks(0, [5])], BLOCK))
        sender.finish((0, BLOCK), caches.pages([GroupBlocks(0, [4])], BLOCK))
        assert receiver.wait(20.0) is Outcome.SUCCESS


# The network ----------------------------------------------------------------------------------------------------------


def test_ports_are_open_to_those_who_need_them_only() -> None:
    admitted = {
        (policy["metadata"]["name"], peer["podSelector"]["matchLabels"]["kvflow.io/role"]): [
            (port["port"], port.get("endPort", port["port"])) for port in rule.get("ports", [EVERY_PORT])
        ]
        for policy in WRITTEN
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    }
    http, every, free = (8000, 8000), (1, 65_535), (32_768, 60_999)
    (control,) = [port["port"] for port in named("Service", "prefill")["spec"]["ports"] if port["name"] == PORT]
    assert admitted == {
        ("prefill", "decode"): [(control, control), free],
        ("prefill", "prefill"): [every],
        ("prefill", "router"): [http],
        ("decode", "prefill"): [free],
        ("decode", "decode"): [every],
        ("decode", "router"): [http],
    }
    assert "kvflow.io/role=router" in PAGE
