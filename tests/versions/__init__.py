"""Two versions of kvflow beside each other, as in a rolling upgrade: the one in `kvflow-*-older.whl`, and this one."""
