"""Native agents, configured like kvflow's own. The only benchmark that imports `kvflow.backends`."""

from contextlib import AbstractContextManager
from typing import Any, Final

from kvflow.backends.mooncake.engine import start_native
from kvflow.backends.mooncake.library import ENVIRONMENT, PEER_TO_PEER, EngineSettings, Library, environment_for
from kvflow.backends.nixl.endpoints import CLOSING_ROUNDS
from kvflow.backends.nixl.library import ENGINE_CONFIG, load

__all__ = ["CLOSING_ROUNDS", "HOST", "NativeMooncake", "start_nixl"]

HOST: Final = "127.0.0.1"


def start_nixl(name: str) -> Any:
    """Start a NIXL agent with UCX.

    Raises:
        BackendUnavailable: The library is missing or broken.
    """
    api = load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"engine_config": ENGINE_CONFIG})
    return agent


class NativeMooncake:
    """A TransferEngine over TCP.

    Attributes:
        engine: The library's own object.

    Raises:
        BackendUnavailable: The library is missing, or no engine could be started.
    """

    def __init__(self) -> None:
        settings = EngineSettings(HOST, "tcp", (), PEER_TO_PEER)
        self._library = Library(environment_for(settings, ENVIRONMENT))
        self.engine: Any = start_native(self._library, HOST, settings)

    def silence(self) -> AbstractContextManager[None]:
        """Keep the library from printing while it is closed."""
        return self._library.silence()
