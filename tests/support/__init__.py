"""Shared helpers of the tests: pools on real memory, a slow oracle, instances of ranks."""

import os

if "FAKE_DEVICE" in os.environ:
    import tests.support.device  # noqa: F401 - first, because it replaces the transports
