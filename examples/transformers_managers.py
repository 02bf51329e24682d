"""Hands a request over between two managers of transformers' continuous batching, each in its own process.

Run `python examples/transformers_managers.py`. Prefill is a process of its own; this process is decode, and also acts
as the router, which passes the prompt and prefill's ticket on. The block sizes of the two differ.
"""

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvflow
from kvflow.cli.smollm2 import prepare_smollm2
from kvflow.engines.transformers.decode import DecodeManager
from kvflow.engines.transformers.prefill import PrefillManager

if TYPE_CHECKING:
    Pipe = Connection[Any, Any]

MODEL: Final = "SmolLM2-135M-Instruct"
QUESTION: Final = "Explain in two sentences what the KV cache of a language model is. " * 8
ROOM: Final = "request-42"
"""Any unique id; a real router draws a new one for each request."""


def make_manager(page_size: int) -> Any:
    """Return a manager that is not running."""
    torch.set_num_threads(1)
    network = LlamaForCausalLM.from_pretrained(prepare_smollm2(), dtype=torch.float32, attn_implementation="sdpa")
    greedy = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=network.config.eos_token_id)
    batching = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=1024 // page_size, max_batch_tokens=64, auto_switch_to_flash=False
    )
    return ContinuousBatchingManager(network.eval(), greedy, batching)


def run_prefill(router: "Pipe") -> None:
    """Compute a prompt and hand it over; then answer it alone, for comparison."""
    manager = make_manager(page_size=32)
    with PrefillManager(manager, kvflow.PrefillConfig(instance="prefill"), fingerprint=MODEL) as end:
        manager.start()
        prompt = router.recv()
        sent = end.add_request(prompt, ROOM)
        router.send(sent.ticket)
        sent.sender.wait()
        sent.sender.result()
        manager.get_result()  # the first token, which decode has received, too
        manager.add_request(prompt)
        router.send(manager.get_result().generated_tokens)
        manager.stop(hard_stop=True)


def main() -> int:
    """Continue the request on decode; return 1 if its answer differs from that of a single manager."""
    ours, theirs = multiprocessing.Pipe()
    prefill = multiprocessing.get_context("spawn").Process(target=run_prefill, args=[theirs], daemon=True)
    prefill.start()
    theirs.close()
    manager = make_manager(page_size=16)
    tokenizer = AutoTokenizer.from_pretrained(prepare_smollm2())
    prompt = tokenizer.encode(QUESTION)
    with DecodeManager(manager, kvflow.DecodeConfig(instance="decode"), fingerprint=MODEL) as end:
        manager.start()
        ours.send(prompt)
        receiver = end.add_request(prompt, ours.recv())
        receiver.wait()
        handover = receiver.result()
        continued, alone = manager.get_result().generated_tokens, ours.recv()
        manager.stop(hard_stop=True)
    prefill.join()
    print(f"moved: {len(prompt)} tokens, {handover.num_bytes / 1e6:.2f} MB, from blocks of 32 tokens to blocks of 16")
    print(f"decode:         {tokenizer.decode(continued)!r}")
    print(f"single manager: {tokenizer.decode(alone)!r}")
    print(f"identical: all {len(alone)} tokens match" if continued == alone else "different: the tokens do not match")
    return 0 if continued == alone else 1


if __name__ == "__main__":
    sys.exit(main())
