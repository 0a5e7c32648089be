"""What the documents tell people to type, and where they say things are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from octavo.cli.flags import resolve
from octavo.cli.main import parse

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTED = re.compile(r"`([^`\n]+)`")
COMMANDS = sorted(
    {
        text
        for document in DOCUMENTS
        for text in [*QUOTED.findall(document.read_text()), *document.read_text().splitlines()]
        if text.startswith("octavo ")
    }
)
LINK = re.compile(r"\]\(([^)#:]+)\)")
FILE = re.compile(r"[\w./-]+(?:\.py|\.md|\.h|\.cpp|/)")


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse(shlex.split(command, comments=True)[1:])
    assert parsed is not None
    resolve(parsed, {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_exist(document: Path) -> None:
    text = document.read_text()
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    for name in QUOTED.findall(text):
        known = [place / name for place in (ROOT, document.parent, ROOT / "src/octavo")]
        if "/" in name and not name.startswith(("/", "folder")) and FILE.fullmatch(name):
            missing += [name] * (not any(path.exists() for path in known))
    assert not missing


def test_python_of_the_readme_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(re.sub(r"^   ", "", block, flags=re.MULTILINE), "README.md", "exec")
