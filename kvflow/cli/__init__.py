"""The command line: `kvflow demo | registry | keys | serve | proxy | replay`.

The only part that prints and, except for backends whose libraries do, the only one that reads the environment.
"""
