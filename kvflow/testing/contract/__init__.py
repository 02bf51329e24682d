"""What every transport has to do, as a class of pytest to subclass; see docs/backends.md."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.base", f"{__name__}.suite")

from kvflow.testing.contract.suite import BackendContract  # noqa: E402 - after its asserts are prepared

__all__ = ["BackendContract"]
