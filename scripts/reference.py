"""Writes the pages of docs/reference from the code they describe. `--check` changes nothing and fails where a page is out of date."""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from octavo import limits

ROOT = Path(__file__).parent.parent
GENERATED = "<!-- Made by scripts/reference.py; change the code instead. -->\n"


def limits_page() -> str:
    """All constants of `octavo.limits` with their values and texts, by section."""
    source = Path(limits.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    page = [
        GENERATED,
        "# Limits\n",
        "What goes beyond a bound is refused with an error that names it. Bounds that depend on a deployment are flags: "
        "`--max-body-bytes`, `--max-header-bytes`, `--max-logprobs`, `--max-model-len`, `--max-num-queued-reqs`.",
    ]
    body = ast.parse(source).body
    sections = [(number, line.strip("#- ")) for number, line in enumerate(lines, 1) if line.startswith("# ---")]
    for node, text in itertools.pairwise(body):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), ast.dump(node)
        while sections and sections[0][0] < node.lineno:
            title = sections.pop(0)[1]
            page.append(f"\n## {title[0].upper()}{title[1:]}\n\n| name | value | what it bounds |\n|---|---|---|")
        value = getattr(limits, node.targets[0].id)
        page.append(f"| `{node.targets[0].id}` | {value:,} | {' '.join(str(text.value.value).split())} |")
    return "\n".join(page) + "\n"


PAGES: dict[str, Callable[[], str]] = {"limits.md": limits_page}


def main() -> int:
    """Writes or checks all pages; the exit status is 1 when a checked page differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / "reference" / name, make()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run scripts/reference.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
