"""Logs, traces and timings: the observable side of kvflow."""
