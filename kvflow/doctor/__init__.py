"""Finds out why transfers fail, or are slower than they could be: `kvflow doctor` (docs/doctor.md).

`findings` has the value class, `checks` the list of the checks of this host, and `worker` what engines run. Each check
is a function in `software`, `host`, `devices`, `transport` or `ranks`. `peer` looks at another rank, and `probe` is a
real transfer between two processes.
"""
