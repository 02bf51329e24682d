"""Tools for authors of transports and adapters: the suites that these must pass, and the endpoints used by the suites.

`kvflow.testing.contract` requires pytest; the rest does not. No other part of kvflow imports this package.
"""
