"""`python -m octavo VERB`: the same as `octavo VERB`."""

from __future__ import annotations

from octavo.cli.main import entry

if __name__ == "__main__":
    entry()
