"""vLLM servers that are killed and replaced at the same addresses, with kvflow's connector and with vLLM's own."""

from benchmarks.vllm_replaced.command import add_arguments, prepare

__all__ = ["add_arguments", "prepare"]
