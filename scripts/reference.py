"""Writes the pages of docs/reference from the code they describe. `--check` changes nothing and fails where a page is out of date."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import limits
from octavo.server.docs.notes import NOTES
from octavo.server.docs.openapi import REQUESTS, document
from octavo.server.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest, not_built_fields
from octavo.server.responses.protocol import ResponsesRequest

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


def compatibility_page() -> str:
    """Every field of every request: what it accepts, or that it is refused, and which tests use it."""
    described = document([(method, path, "") for method, path in REQUESTS])["components"]["schemas"]
    tests = _tests_by_field()
    page = [
        GENERATED,
        "# Compatibility\n",
        "Every request field that OpenAI's, Anthropic's and vLLM's APIs have for text models. A field works or is refused by "
        "name with a 400; none is ignored. Where a field is refused, a value that asks for nothing is still accepted, so that "
        "clients which always send it work. `null` is the same as leaving a field out. Images, audio and files are refused "
        "where they stand in a conversation.",
    ]
    for (method, path), kind in REQUESTS.items():
        properties = described[kind.__name__]["properties"]
        refused = {
            name: values for name, values in not_built_fields(kind).items() if name not in kind.__struct_fields__
        }
        page.append(f"\n## {method} {path}\n\n| field | accepts | what it does | tested by |\n|---|---|---|---|")
        page += [
            f"| `{name}` | {_brief(properties[name])} | {NOTES[name]} | {_named(name, tests)} |"
            for name in sorted(kind.__struct_fields__)
        ]
        if refused:
            page.append("\nRefused:\n\n| field | still accepted | tested by |\n|---|---|---|")
            for name, values in sorted(refused.items()):
                neutral = ", ".join(f"`{json.dumps(value)}`" for value in values) or "nothing"
                page.append(f"| `{name}` | {neutral} | {_REFUSALS[kind]} |")
    return "\n".join(page) + "\n"


_REFUSALS: dict[Any, str] = {
    ResponsesRequest: "`responses/test_responses.py::test_every_field_that_is_not_built_is_refused`",
    MessagesRequest: "`messages/test_messages.py::test_fields_that_are_not_built_are_refused_by_name`",
    CountTokensRequest: "`docs/test_openapi.py::test_each_value_of_each_field_is_judged_alike`",
    ChatCompletionRequest: "`test_fields.py::test_fields_that_are_not_built_are_refused_by_name`",
    CompletionRequest: "`test_fields.py::test_fields_that_are_not_built_are_refused_by_name`",
}


def _brief(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        parts = [_brief(part) for part in schema["anyOf"] if part != {"type": "null"}]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_brief(schema.get('items', {}))}"
    bounds = [schema.get("minimum"), schema.get("maximum")]
    if bounds != [None, None]:
        low, high = ("" if bound is None else f"{bound:g}" for bound in bounds)
        return f"{kind} {low} to {high}".rstrip() if high else f"{kind} from {low}"
    return kind


def _tests_by_field() -> dict[str, list[str]]:
    """Field -> tests of the server that send it: as a keyword or as a key."""
    found: dict[str, list[str]] = {}
    for folder in ("unit/server", "api", "unit/frontend"):
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
                    continue
                inside = [*ast.walk(node)]
                names = {one.arg for one in inside if isinstance(one, ast.keyword)}
                names |= {one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)}
                for name in names & NOTES.keys():
                    found.setdefault(name, []).append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def _named(field: str, tests: dict[str, list[str]]) -> str:
    if field not in tests:
        raise SystemExit(f"no test sends the field {field}")
    return ", ".join(f"`{name.removeprefix('unit/server/')}`" for name in tests[field][:2])


PAGES: dict[str, Callable[[], str]] = {"limits.md": limits_page, "compatibility.md": compatibility_page}


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
