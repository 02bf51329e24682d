"""The demo as a new user runs it: real processes, a real transport, a real model."""

import json
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvflow.cli.demo import migration, ranks, router, sides
from kvflow.cli.demo.migration import MARGIN
from kvflow.cli.demo.models import LanguageModel, load_model
from kvflow.cli.demo.options import KV_HEADS, MODELS, DemoOptions, SideName
from kvflow.cli.demo.pools import RankPool, rebuild_cache
from kvflow.cli.main import main
from kvflow.cli.smollm2 import prepare_smollm2

KEYS = {
    "identical",
    "backend",
    "prefill_tp",
    "decode_tp",
    "tokens",
    "bytes",
    "compute_ms",
    "handover_ms",
    "stages_ms",
}
TINY_PROMPT_TOKENS = 30
TINY_BYTES_PER_TOKEN = 2 * 4 * 3 * 16 * 4
"""K and V, layers, KV heads, head_dim, float32."""


def run_demo(*options: str) -> tuple[int, str, str]:
    return run("-m", "kvflow.cli", "demo", *options)


def run(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return finished.returncode, finished.stdout, finished.stderr


def check(output: str, **expected: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output)
    assert result.keys() >= KEYS
    assert {name: result[name] for name in expected} == expected
    assert set(result["stages_ms"]) == {"bootstrap", "enqueue", "planning", "submit", "aggregate"}
    assert all(time_ms >= 0 for time_ms in result["stages_ms"].values())
    assert result["compute_ms"] > 0
    assert result["handover_ms"] > 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(3, 1), (1, 3), (3, 3), (6, 3)])
def test_tiny_model_over_nixl_between_two_processes(prefill_tp: int, decode_tp: int) -> None:
    code, out, err = run_demo(
        *("--model", "tiny", "--json", "--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp)),
        *("--prompt", "x" * TINY_PROMPT_TOKENS, "--chunk", "7", "--page-size", "4", "--tokens", "12"),
    )
    assert (code, err) == (0, "")
    check(
        out,
        identical=True,
        backend="nixl",
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        tokens=12,
        bytes=TINY_PROMPT_TOKENS * TINY_BYTES_PER_TOKEN,
    )


@pytest.mark.slow
def test_tiny_model_over_mooncake_between_two_processes() -> None:
    prompt = ("--prompt", "x" * TINY_PROMPT_TOKENS, "--tokens", "12")
    code, out, err = run_demo("--model", "tiny", "--backend", "mooncake", "--json", *prompt)
    assert (code, err) == (0, "")
    check(out, identical=True, backend="mooncake", bytes=TINY_PROMPT_TOKENS * TINY_BYTES_PER_TOKEN)


@pytest.mark.parametrize("decode_tp", [1, 3])
def test_a_request_moves_to_another_server_while_it_is_answered(
    decode_tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["demo", "--migrate", "--model", "tiny", "--backend", "memory", "--json"]
    assert main([*options, "--decode-tp", str(decode_tp), "--prompt", "x" * TINY_PROMPT_TOKENS]) == 0
    result = check(capsys.readouterr().out, identical=True, tokens=48)
    migration = result["migration"]
    num_moved = TINY_PROMPT_TOKENS + migration["tokens_before"] - 1
    assert migration["tokens_before"] == 12 + 8
    assert migration["bytes"] == num_moved * TINY_BYTES_PER_TOKEN


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_smollm2_goes_on_in_another_process_in_the_middle_of_a_sentence(backend: str) -> None:
    code, out, err = run_demo("--migrate", "--backend", backend, "--json")
    assert (code, err) == (0, "")
    result = check(out, identical=True, backend=backend, model="smollm2")
    assert "Mercury, Venus, Earth, Mars" in result["text"]
    assert result["migration"]["tokens_before"] < result["tokens"]


def test_a_text_that_ends_early_does_not_move(capsys: pytest.CaptureFixture[str]) -> None:
    def ends_early(model: LanguageModel, tokens: list[int]) -> bool:
        return len(tokens) >= 15

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "ends_with", ends_early)
        assert main(["demo", "--migrate", "--model", "tiny", "--backend", "memory"]) == 0
    assert "none: the text was complete before" in capsys.readouterr().out


@pytest.mark.parametrize("num_chunks", [pytest.param(4, marks=pytest.mark.slow), pytest.param(MARGIN, id="last chunk")])
def test_a_text_goes_on_where_it_was_if_the_other_server_is_killed(
    num_chunks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped before the chunk is sent, so that it cannot take it, and killed afterwards."""
    second: list[subprocess.Popen[bytes]] = []
    sent: list[tuple[int, int]] = []
    send, open_process = migration._send, sides._open_process

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            second.append(self)

    def open_side(side: SideName, options: DemoOptions) -> AbstractContextManager[Any]:
        return open_process(side, options) if side == "second" else sides._open_thread(side, options)

    def send_and_kill(senders: Any, pools: Any, start: int, stop: int, **options: Any) -> None:
        is_now = len(sent) == num_chunks
        if is_now:
            while not all(sender.wanted for sender in senders):  # it has granted its pages
                senders[0].wait(0.01)
            second[0].send_signal(signal.SIGSTOP)
        sent.append((start, stop))
        send(senders, pools, start, stop, **options)
        if is_now:
            second[0].kill()

    monkeypatch.setattr(sides, "_open_process", open_side)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(migration, "_send", send_and_kill)
    options = ["demo", "--migrate", "--model", "tiny", "--backend", "nixl", "--json"]
    assert main([*options, "--prompt", "x" * TINY_PROMPT_TOKENS]) == 0
    result = check(capsys.readouterr().out, identical=True, tokens=48)
    assert result["migration"]["failed"].startswith("transfer failed")
    assert len(sent) > num_chunks


@pytest.mark.slow
def test_smollm2_over_nixl_between_two_processes() -> None:
    code, out, err = run_demo("--json")
    assert (code, err) == (0, "")
    result = check(out, identical=True, backend="nixl", prefill_tp=3, decode_tp=1, model="smollm2")
    assert result["bytes"] == result["prompt_tokens"] * 2 * 30 * 3 * 64 * 4
    assert "Mercury, Venus, Earth, Mars" in result["text"]


@pytest.mark.slow
def test_example_hands_a_request_over_between_two_managers_of_transformers() -> None:
    code, out, _ = run(str(Path(__file__).parents[2] / "examples/transformers_managers.py"))
    assert code == 0
    assert "identical: all 24 tokens match" in out


@pytest.mark.slow
def test_model_of_a_directory() -> None:
    code, out, _ = run_demo("--model", str(prepare_smollm2()), "--json", "--prompt", "Hello", "--tokens", "3")
    assert code == 0
    check(out, identical=True, tokens=3)
    code, out, err = run_demo("--model", str(prepare_smollm2()), "--decode-tp", "2", "--prompt", "Hello")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("kvflow demo: KV heads cannot be split evenly among the ranks")


def test_side_that_ends_early_ends_the_demo(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, out, err = run_demo("--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert "is not a valid JSON file" in err
    assert err.splitlines()[-1].startswith("kvflow demo: side ended without a report")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(3, 1), (3, 6)])
def test_tiny_model_over_memory_in_one_process(
    prefill_tp: int, decode_tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["demo", "--model", "tiny", "--backend", "memory", "--json"]
    assert main([*options, "--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp)]) == 0
    check(capsys.readouterr().out, identical=True, backend="memory", prefill_tp=prefill_tp, decode_tp=decode_tp)


def test_person_sees_text_figures_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "tiny", "--backend", "memory", "--tokens", "5"]) == 0
    shown = capsys.readouterr()
    for words in ("the decode side continues", "computed in", "ms after the last chunk", "all 5 tokens are identical"):
        assert words in shown.out
    assert "planning" not in shown.out
    for words in ("prefill: ready", "decode: ready", "MB received in"):
        assert words in shown.err


@pytest.mark.slow
def test_log_for_machines_is_one_object_a_line() -> None:
    code, _, err = run_demo("--model", "tiny", "--json", "--log", "json", "--tokens", "2")
    lines = [json.loads(line) for line in err.splitlines()]
    assert code == 0
    assert {"rank_opened", "registered", "peer_connected", "rank_closed"} <= {line["event"] for line in lines}


@pytest.mark.parametrize("layer", [0, 3])
def test_wrong_bytes_show_in_the_tokens(
    layer: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A control: without the transfer of a layer, the verdict differs."""

    def rebuild_without_a_layer(model: LanguageModel, pools: list[RankPool], num_tokens: int) -> DynamicCache:
        cache = rebuild_cache(model, pools, num_tokens)
        for tensor in (cache.layers[layer].keys, cache.layers[layer].values):
            tensor.zero_()
        return cache

    monkeypatch.setattr(ranks, "rebuild_cache", rebuild_without_a_layer)
    assert main(["demo", "--model", "tiny", "--backend", "memory", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["identical"] is False


def test_page_that_was_not_written_is_noticed() -> None:
    model = load_model("tiny")
    cache = model.new_cache()
    model.step(model.encode("sixteen tokens.."), cache)
    pool = RankPool(model, (0, 3), page_size=4, num_tokens=16, seed=0)
    pool.write(cache, 0, 12)
    with pytest.raises(RuntimeError, match="never written"):
        rebuild_cache(model, [pool], 16)
    pool.write(cache, 12, 16)
    assert torch.equal(keys_and_values(rebuild_cache(model, [pool], 16)), keys_and_values(cache))


def keys_and_values(cache: DynamicCache) -> torch.Tensor:
    layers: list[Any] = list(cache.layers)
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prefill-tp", "0"], ["--prefill-tp", "0"]),
        (["--page-size", "-1"], ["--page-size", "-1"]),
        (["--prompt", ""], ["--prompt"]),
        (["--model", "/nowhere"], ["/nowhere", "smollm2", "tiny"]),
        (["--prefill-tp", "2"], ["total_kv_heads=3", "tp_size=2"]),
        (["--decode-tp", "5", "--model", "tiny"], ["total_kv_heads=3", "tp_size=5"]),
    ],
)
def test_unusable_options_are_named_before_anything_is_started(
    options: list[str], named: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router, "open_sides", None)
    assert main(["demo", *options]) == 2
    message = capsys.readouterr().err
    for word in named:
        assert word in message
    assert "Traceback" not in message


@pytest.mark.parametrize("name", MODELS)
def test_models_have_as_many_kv_heads_as_is_checked(name: str) -> None:
    assert load_model(name).config.num_key_value_heads == KV_HEADS
