"""The contract of every transport, as a pytest class to subclass; see docs/backends.md."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.base", f"{__name__}.suite")

from kvflow.testing.contract.suite import BackendContract  # noqa: E402 - after its asserts were registered

__all__ = ["BackendContract"]
