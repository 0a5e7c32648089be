"""LangChain and LlamaIndex against a real server. They need other versions of the openai package than the tests, so they get an
environment of their own, `.venv-clients`, which is made when it is missing.
"""

from __future__ import annotations

import subprocess
import sys
import venv

from harness import ROOT, live

CLIENTS = ROOT / "tests" / "clients"
ENVIRONMENT = ROOT / ".venv-clients"


def main() -> int:
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "installed.txt"
    wanted = (CLIENTS / "requirements.txt").read_text(encoding="utf-8")
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-compile", "-r", CLIENTS / "requirements.txt"], check=True
        )
        done.write_text(wanted, encoding="utf-8")
    with live("serve", "--max-model-len", "1024", "--kv-cache-memory", "64M") as server:
        for script in ("langchain_client.py", "llama_index_client.py"):
            subprocess.run([python, CLIENTS / script, server.url, "smollm2-135m"], check=True, timeout=300)
    return 0


if __name__ == "__main__":
    sys.exit(main())
