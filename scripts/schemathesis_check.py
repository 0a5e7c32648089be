"""schemathesis against `octavo mock`, by the server's own OpenAPI document: no 5xx, and every answer as it is described. A short run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from harness import live

CHECKS = ",".join(
    (
        "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
        "negative_data_rejection", "unsupported_method", "allow_header_conformance",
    )
)  # fmt: skip
CONFIG = """
[checks]
# A deadline that the request itself gives may pass.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
# Boundary values of each of their many fields are a unit test (test_openapi.py), and faster there.
[[operations]]
include-path-regex = "^/v1/(chat/completions|completions|responses)$"
phases.coverage.enabled = false
"""
SERVER = ("--responses-store", "--responses-store-max", "100", "--admin-api-key", "admin")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
        with live("mock", *SERVER, "--responses-store-path", f"{folder}/responses.sqlite") as server:
            command = [
                Path(sys.executable).parent / "schemathesis", "run", f"{server.url}/openapi.json", "--checks", CHECKS,
                "--max-examples", "12", "--seed", "1", "--request-timeout", "20", "--workers", "1", "--no-color",
                "--suppress-health-check", "all", "-H", "Authorization: Bearer admin", *sys.argv[1:],
            ]  # fmt: skip
            return subprocess.run(command, cwd=folder, timeout=300).returncode


if __name__ == "__main__":
    sys.exit(main())
