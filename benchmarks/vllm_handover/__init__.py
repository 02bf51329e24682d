"""vLLM servers with kvflow's connector and with vLLM's own, in turn: handovers, first tokens, equal texts."""

from benchmarks.vllm_handover.command import add_arguments, prepare

__all__ = ["add_arguments", "prepare"]
