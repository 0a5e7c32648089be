"""Black-box conformance checks (a folder with a conformance.py) against `octavo serve`, once without and once with a key.

    python scripts/conformance.py ../shared/conformance

Fails when a check fails, or when more than three are skipped in both runs: some need a server with a key, some one without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.live import live  # noqa: E402 - the tests' server harness, made importable above

SKIPS_ALLOWED = 3
FLAGS = ("--max-model-len", "2048")
"""Several checks fill the context; the default model's whole one would take minutes."""


def run(checks: Path, folder: Path, *key: str) -> dict[str, str]:
    """Outcomes by check, of all checks against one server."""
    results = folder / "results.json"
    with live("serve", *FLAGS, *key) as server:
        command = [
            sys.executable, checks / "conformance.py", "--base-url", server.url, "--model", "smollm2-135m", "--json", results, *key,
        ]  # fmt: skip
        subprocess.run(command, timeout=600)
    found = json.loads(results.read_text(encoding="utf-8"))
    return {f"{one['case']} {one['name']}": one["outcome"] for one in found}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(Path(sys.argv[1]), Path(folder), *key) for key in ((), ("--api-key", "conformance-key"))]
    failed = [f"{name} (run {number})" for number, one in enumerate(runs) for name in one if one[name] == "FAIL"]
    skipped = [name for name in runs[0] if all(one[name] == "SKIP" for one in runs)]
    print(f"{len(runs[0])} checks twice: {len(failed)} failed {failed}, {len(skipped)} skipped in both {skipped}")
    return int(bool(failed) or len(skipped) > SKIPS_ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
