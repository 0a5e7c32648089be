"""`python -m octavo.entrypoints.openai.api_server --model M --port P`: the same as `octavo serve`."""

from __future__ import annotations

import sys

from octavo.__main__ import entry

if __name__ == "__main__":
    entry(["serve", *sys.argv[1:]])
