"""The demo between two managers of transformers' continuous batching, `kvflow demo --engine transformers`."""

from collections.abc import Callable
from typing import Any, Final

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvflow
from kvflow.cli.demo.models import LanguageModel, load_model
from kvflow.cli.demo.options import DemoOptions, SideName
from kvflow.cli.processes import Line
from kvflow.engines.transformers.decode import DecodeManager
from kvflow.engines.transformers.prefill import PrefillManager

__all__ = ["RUN"]

ROOM: Final = "request-42"
"""Any unique id; a real router draws a new one for each request."""


def _run_prefill(options: DemoOptions, line: Line) -> None:
    """Hand one request over, and also compute it alone, for comparison."""
    model, prompt, manager = _load(options, line)
    config = kvflow.PrefillConfig(instance="prefill", backend=options.backend)
    with PrefillManager(manager, config, fingerprint=model.name) as end:
        manager.start()
        try:
            line.report("ready", prompt_tokens=len(prompt))
            line.receive()
            sent = end.add_request(prompt, ROOM)
            line.report("ticket", ticket=sent.ticket)
            sent.sender.wait()
            sent.sender.result()
            line.report("stages")
            manager.get_result()  # the first token
            manager.add_request(prompt)
            line.report("reference", **_text(model, manager.get_result()))
        finally:
            manager.stop(hard_stop=True)


def _run_decode(options: DemoOptions, line: Line) -> None:
    """Take one request over, and answer it."""
    model, prompt, manager = _load(options, line)
    config = kvflow.DecodeConfig(instance="decode", backend=options.backend)
    with DecodeManager(manager, config, fingerprint=model.name) as end:
        manager.start()
        try:
            line.report("ready")
            receiver = end.add_request(prompt, line.receive()["ticket"])
            receiver.wait()
            handover = receiver.result()
            line.report("handover", num_bytes=handover.num_bytes, notices=handover.num_notices)
            line.report("answer", **_text(model, manager.get_result()))
        finally:
            manager.stop(hard_stop=True)


RUN: Final[dict[SideName, Callable[[DemoOptions, Line], None]]] = {"prefill": _run_prefill, "decode": _run_decode}


def _load(options: DemoOptions, line: Line) -> tuple[LanguageModel, list[int], Any]:
    """Create the model, the prompt and a manager that is not running."""
    model = load_model(options.model, lambda text: line.report("note", text=text))
    model.network.set_attn_implementation("sdpa")
    prompt = model.encode(options.prompt)
    page_size = options.page_size_of(options.side)
    batching = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=2 * -(-(len(prompt) + options.tokens) // page_size),
        max_batch_tokens=options.chunk_tokens,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=options.tokens, eos_token_id=sorted(model.end_ids))
    return model, prompt, ContinuousBatchingManager(model.network, greedy, batching)


def _text(model: LanguageModel, output: Any) -> dict[str, Any]:
    return {"tokens": output.generated_tokens, "text": model.decode(output.generated_tokens)}
