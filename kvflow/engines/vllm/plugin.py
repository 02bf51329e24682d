"""Entry point of the group `vllm.general_plugins`: vLLM calls `activate` in each of its processes."""

from typing import Final

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["NAME", "activate"]

NAME: Final = "KvflowConnector"
OFFLOADING: Final = "KvflowOffloadingConnector"


def activate() -> None:
    """Register the connectors under their names. May be called twice."""
    for name, module in ((NAME, "connector"), (OFFLOADING, "offloading")):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, f"kvflow.engines.vllm.{module}", name)
