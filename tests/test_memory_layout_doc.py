"""The code computes every number and drawing of docs/memory-layout.md."""

import doctest
import re
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "memory-layout.md"
EXAMPLE = re.compile(r"```pycon\n(.*?)```", re.DOTALL)


def test_every_example_gives_what_it_shows() -> None:
    text = DOCUMENT.read_text()
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names: dict[str, object] = {}
    for found in EXAMPLE.finditer(text):
        line = text.count("\n", 0, found.start(1))
        example = parser.get_doctest(found[1], names, f"{DOCUMENT.name} line {line + 1}", str(DOCUMENT), line)
        said: list[str] = []
        result = runner.run(example, out=said.append, clear_globs=False)
        names.update(example.globs)
        assert result.attempted > 0
        assert result.failed == 0, "".join(said)


def test_every_kind_of_layout_has_an_example() -> None:
    chapters = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    assert len(chapters) >= 9
    for chapter in chapters:
        assert EXAMPLE.search(chapter), chapter.partition("\n")[0]
