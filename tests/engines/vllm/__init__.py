"""The adapter of vLLM: real servers on CPUs, and real routers before them."""
