"""The tests, by subject."""

from kvflow.testing.contract.suite.blocks import BlockContract
from kvflow.testing.contract.suite.closing import ClosingContract
from kvflow.testing.contract.suite.memory import MemoryContract
from kvflow.testing.contract.suite.metadata import MetadataContract
from kvflow.testing.contract.suite.peers import PeerContract
from kvflow.testing.contract.suite.processes import ProcessContract
from kvflow.testing.contract.suite.writes import WriteContract

__all__ = ["BackendContract"]


class BackendContract(
    WriteContract,
    BlockContract,
    PeerContract,
    MetadataContract,
    MemoryContract,
    ClosingContract,
    ProcessContract,
):
    """The full contract of a transport. Subclass it under a name that starts with "Test", and set `backend`."""
