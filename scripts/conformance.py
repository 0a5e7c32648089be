"""Black-box conformance checks (a folder with a conformance.py) against `octavo serve`, with and without a key.

    python scripts/conformance.py ../shared/conformance
    python scripts/conformance.py ../shared/conformance --short   # without a key only those that look at doors, shapes and the SDK

Fails when a check fails, or when more than three are skipped in both runs: some need a server with a key, some one without.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import live

SKIPS_ALLOWED = 3
FLAGS = ("--max-model-len", "2048")
"""Several checks fill the context; the default model's whole one would take minutes."""
KEY = ("--api-key", "conformance-key")
SHORT = ("--only", "S-01,S-02,S-03,S-04,S-05,O-36,O-45,K-01,P3,P4,P5,P6")


def run(checks: Path, key: tuple[str, ...], only: tuple[str, ...]) -> dict[str, str]:
    """Outcomes by check, of all checks against one server."""
    with tempfile.TemporaryDirectory() as folder, live("serve", *FLAGS, *key) as server:
        results = Path(folder) / "results.json"
        command = [
            sys.executable, checks / "conformance.py", "--base-url", server.url, "--model", "smollm2-135m", "--json", results,
            *key, *only,
        ]  # fmt: skip
        subprocess.run(command, timeout=600)
        found = json.loads(results.read_text(encoding="utf-8"))
    return {f"{one['case']} {one['name']}": one["outcome"] for one in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        kinds = ((KEY, ()), ((), SHORT if arguments.short else ()))
        keyed, bare = threads.map(lambda kind: run(arguments.folder, *kind), kinds)
    failed = [name for one in (keyed, bare) for name in one if one[name] == "FAIL"]
    skipped = [name for name in keyed if keyed[name] == bare.get(name, "SKIP") == "SKIP"]
    print(
        f"{len(keyed)} checks with a key, {len(bare)} without: {len(failed)} failed, {len(skipped)} skipped: {skipped}"
    )
    return int(bool(failed) or len(skipped) > SKIPS_ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
