"""Tests of the vLLM adapter: real servers on CPUs, behind real routers."""
