"""Two hosts, for probes between them."""

from tests.hosts.conftest import two_hosts

__all__ = ["two_hosts"]
