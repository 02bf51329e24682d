"""Benchmarks for the developers of kvflow: `python -m benchmarks NAME`. Not part of the wheel."""
