"""What deploy/kubernetes describes: its objects, and the servers in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["MANIFESTS", "SERVERS", "Server", "read_objects"]

MANIFESTS: Final = Path(__file__).parents[2] / "deploy/kubernetes"

BY_CONTROLLER: Final = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "prefill-0.prefill.ns"}
"""What the controller of LeaderWorkerSets sets."""


def read_objects(text: str) -> list[dict[str, Any]]:
    """Return the objects in a manifest."""
    return [msgspec.yaml.decode(part) for part in re.split(r"^---\n", text, flags=re.MULTILINE)]


class Server(NamedTuple):
    """One kind of servers.

    Attributes:
        file: Where it is described.
        kind: Of what makes its pods.
        template: Of its pods.
    """

    file: str
    kind: str
    template: dict[str, Any]

    @property
    def pod(self) -> dict[str, Any]:
        """What its pods are."""
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """The container of the server."""
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def commands(self) -> list[list[str]]:
        """What Kubernetes runs in the container."""
        hooks = [self.container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        hooks.append(self.container["lifecycle"]["preStop"])
        return [hook["exec"]["command"] for hook in hooks if "exec" in hook]

    def expand_arguments(self, **values: str) -> list[str]:
        """Return vLLM's arguments, with environment variables as Kubernetes expands them.

        Raises:
            KeyError: One is not set.
        """
        names = {entry["name"] for entry in self.container["env"]}
        found = BY_CONTROLLER if self.kind == "LeaderWorkerSet" else {}
        found = found | {name: values.get(name, f"the-{name.lower()}") for name in [*names, "MODEL"]}
        return [re.sub(r"\$\((\w+)\)", lambda it: found[it[1]], argument) for argument in self.container["args"]]

    def read_transfer(self, **values: str) -> dict[str, Any]:
        """Return its `--kv-transfer-config`."""
        (text,) = [found for argument in self.expand_arguments(**values) if (found := argument.partition("config=")[2])]
        transfer: dict[str, Any] = msgspec.json.decode(text)
        return transfer


def _find_servers() -> Iterator[Server]:
    for file in sorted(MANIFESTS.glob("*/*.yaml")):
        for one in read_objects(file.read_text()):
            spec = one.get("spec", {})
            template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
            if template:
                yield Server(f"{file.parent.name}/{file.stem}", one["kind"], template)


SERVERS: Final = list(_find_servers())
