"""Tests that need a device, and the steps of `make test-device`, which run them where nothing is installed yet."""
