"""What the developers of kvflow measure: `python -m benchmarks NAME`. It is not part of the wheel."""
