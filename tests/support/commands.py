"""Whether a command line would be accepted, without running it."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["check_arguments"]

PARSE = argparse.ArgumentParser.parse_args


class _AcceptedError(Exception):
    """The parser has accepted everything."""


def _parse(parser: argparse.ArgumentParser, *args: Any) -> None:
    PARSE(parser, *args)
    raise _AcceptedError


def check_arguments(program: Callable[[list[str]], int], words: list[str]) -> None:
    """Let a program parse its arguments, but do nothing; SystemExit if it does not accept them.

    With `--help` behind them, it would accept options that do not exist.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse)
        with pytest.raises(_AcceptedError):
            program(words)
