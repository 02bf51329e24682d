"""The command line: `kvflow demo | bench | registry`. The only place that reads the environment or prints."""
