"""For those who write a transport: the suite that it has to pass, and the endpoints that the suite is made of.

`kvflow.testing.contract` needs pytest; the rest does not. Nothing of kvflow imports this package.
"""
