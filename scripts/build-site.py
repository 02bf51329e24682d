"""Build the documents as a site that loads nothing from elsewhere. `make site` runs it.

The documents are written for the repository: they link to its files, and have diagrams that a forge draws. Copies of
them are made in which links lead from page to page, files that are no pages are only named, and diagrams are pictures.
Beside each page of the site is its text (`guide/index.html` and `guide.md`), which `llms.txt` lists.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import mmdr

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = ROOT / "dist"
STAGED: Final = PROJECT / "pages"
BUILT: Final = PROJECT / "site"
KVFLOW: Final = ROOT / ".venv/bin/kvflow"

LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
MERMAID: Final = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
LIST: Final = re.compile(r"^([^\s|>#`-][^\n]*\n)(?=- )", re.MULTILINE)
"""A line of a paragraph before a list, which a forge ends there, and Python-Markdown does not."""

COMMAND: Final = re.compile(r"^    (\w+) ", re.MULTILINE)
EXTERNAL: Final = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")


def find_pages() -> dict[Path, Path]:
    """Return where each page goes, relative to the site, by its path in the repository."""
    pages = {page: page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    pages |= {page: Path(page.name) for page in ROOT.glob("*.md")}
    return pages | {ROOT / "README.md": Path("index.md"), ROOT / "docs/README.md": Path("documentation.md")}


def stage_pages(pages: dict[Path, Path]) -> None:
    """Write the copies, their pictures, and the page of the commands."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for page, place in pages.items():
        text = LIST.sub(r"\1\n", draw_diagrams(page.read_text(), place))
        write(place, LINK.sub(lambda found, page=page: relink(found, page, pages), text))
    shutil.copyfile(ROOT / "mkdocs.yml", PROJECT / "mkdocs.yml")
    shutil.copytree(ROOT / "docs/images", STAGED / "images", dirs_exist_ok=True)
    write(Path("commands.md"), describe_commands())


def write(place: Path, text: str) -> None:
    """Write a staged file."""
    (STAGED / place).parent.mkdir(parents=True, exist_ok=True)
    (STAGED / place).write_text(text)


def draw_diagrams(text: str, place: Path) -> str:
    """Replace the diagrams of a page by links to pictures, which are written beside it."""
    drawn = 0

    def draw(found: re.Match[str]) -> str:
        nonlocal drawn
        drawn += 1
        picture = Path("images") / f"{place.stem}-{drawn}.svg"
        write(picture, mmdr.render(found[1]).svg())
        return f"![Diagram {drawn}]({os.path.relpath(picture, place.parent)})"

    return MERMAID.sub(draw, text)


def relink(found: re.Match[str], page: Path, pages: dict[Path, Path]) -> str:
    """Return a link of a page as it is on the site."""
    picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or (picture and not (page.parent / target).exists()):
        return found[0]  # within the page, or drawn above
    path = (page.parent / target).resolve()
    if picture:
        place = path.relative_to(ROOT / "docs")
    elif path in pages:
        place = pages[path]
    elif path.is_dir() and path / "README.md" in pages:
        place = pages[path / "README.md"]
    else:
        return str(text)
    return f"{picture}[{text}]({os.path.relpath(place, pages[page].parent)}{anchor})"


def describe_commands() -> str:
    """Return a page with the help of each command."""
    commands = COMMAND.findall(help_of())
    parts = [f"## kvflow {command}\n\n```text\n{help_of(command)}```\n" for command in commands]
    return "\n".join(["# Commands\n", f"```text\n{help_of()}```\n", *parts])


def help_of(*command: str) -> str:
    """Return the help of a command."""
    done = subprocess.run([KVFLOW, *command, "--help"], capture_output=True, text=True, check=True)
    return done.stdout


def add_texts(pages: dict[Path, Path]) -> None:
    """Put the text of each page beside it, and list the texts in llms.txt."""
    for place in pages.values():
        (BUILT / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STAGED / place, BUILT / place)
    shutil.copyfile(STAGED / "commands.md", BUILT / "commands.md")
    listed = (STAGED / "documentation.md").read_text().partition("\n## Words")[0].partition("\n")[2]
    (BUILT / "llms.txt").write_text(
        f"# kvflow\n\n> {(STAGED / 'index.md').read_text().split(chr(10) * 2)[1]}\n{listed}"
    )


def check_pages() -> list[str]:
    """Return what is wrong: what pages load from elsewhere, and pages that are empty."""
    wrong = list[str]()
    for page in sorted(BUILT.rglob("*.html")):
        text = page.read_text()
        wrong += [f"{page.relative_to(BUILT)} loads {found}" for found in EXTERNAL.findall(text)]
        if page.name == "index.html" and len(text) < 8_000:
            wrong.append(f"{page.relative_to(BUILT)} is empty")
    return wrong


def main() -> None:
    """Build the site; exit with 1 if something is wrong with it."""
    pages = find_pages()
    stage_pages(pages)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--clean", "--strict"], cwd=PROJECT, check=True)
    add_texts(pages)
    wrong = check_pages()
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(pages) + 1} pages in {BUILT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
