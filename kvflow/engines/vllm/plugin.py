"""Entry point of the group `vllm.general_plugins`: vLLM calls `activate` in each of its processes."""

from typing import Final

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["NAME", "activate"]

NAME: Final = "KvflowConnector"


def activate() -> None:
    """Register the connector under its name. May be called twice."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvflow.engines.vllm.connector", NAME)
