"""The example for engine authors in docs/simulation.md runs verbatim."""

import re
from pathlib import Path

import pytest

import kvflow

DOCUMENT = Path(kvflow.__file__).parent.parent / "docs/simulation.md"


def test_the_toy_scheduler_in_the_document_runs() -> None:
    pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    names: dict[str, list[bytes]] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)  # noqa: S102 - its own assertions are the test
    assert len(names["delivered"]) == len(set(names["delivered"]))
