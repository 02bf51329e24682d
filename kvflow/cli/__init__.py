"""The command line: `kvflow demo | bench | registry | simulate | explore | replay`.

The only place that prints, and, but for backends whose libraries do, the only one that reads the environment.
"""
