"""The choice of a transport on the command line."""

import argparse

import kvflow

__all__ = ["add_backend_option", "check_backend"]


def add_backend_option(parser: argparse.ArgumentParser, default: str = "nixl") -> None:
    """Declare `--backend`, which takes whatever is installed."""
    parser.add_argument(
        "--backend", default=default, metavar="NAME", help="transport, also of a plugin (default: %(default)s)"
    )


def check_backend(name: str, *, between_processes: bool = False) -> str:
    """Make sure that there is such a transport, before anything is started with it.

    Args:
        name: As the user gave it.
        between_processes: It has to reach other processes, so `memory` will not do.

    Raises:
        ConfigError: Naming those that there are.
    """
    names = [known for known in kvflow.known_backends() if known != "memory" or not between_processes]
    if name not in names:
        raise kvflow.ConfigError("unknown backend, or none for this command", backend=name, known=names)
    return name
