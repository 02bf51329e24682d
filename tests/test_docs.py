"""What the documents say is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]+)[^)]*\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text()
    for decision in (ROOT / "docs/decisions").glob("0*.md"):
        assert decision.name in listed


def test_readme_example_runs() -> None:
    example, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    finished = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, timeout=50)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "metadata=b'first token'" in finished.stdout
