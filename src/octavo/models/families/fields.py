"""Typed reading of a model's own configuration, which is untrusted: every value is checked, and a bad one named.

Knows no architecture: which keys exist and what they mean is the families' business.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelFileError, UnsupportedModelError

MAX_SIZE = 1 << 24
"""Bound on any size read from a file, so that a damaged one cannot make octavo loop or allocate without end."""


class Fields:
    """Keys of a GGUF file's metadata under one prefix, or of a config.json (no prefix).

    A key that is absent or null counts as not given. Reading one raises ModelFileError naming the full key when its
    value is not of the asked kind, or is missing without a default.
    """

    def __init__(self, values: Mapping[str, Any], *, source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def is_null(self, key: str) -> bool:
        """True when the key is there and says null, which may mean something else than its absence."""
        return self._prefix + key in self._values and key not in self

    def name(self, key: str) -> str:
        """How messages call a key."""
        return f"{self._source} {self._prefix}{key}"

    def size(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ModelFileError(
                f"{self.name(key)} is {_shown(value)}; expected a whole number from {minimum} to {maximum}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ModelFileError(f"{self.name(key)} is {_shown(value)}; expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{self.name(key)} is {_shown(value)}; expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.name(key)} is {_shown(value)}; expected a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ModelFileError(f"{self.name(key)} is {_shown(value)}; expected a list of strings")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """The keys of a nested object; none when it is not given."""
        value = self._values.get(self._prefix + key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ModelFileError(f"{self.name(key)} is {_shown(value)}; expected an object")
        return Fields(value, source=f"{self.name(key)}:")

    def refuse_unless_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses by name each given key whose value is not one of those listed: options that change the arithmetic."""
        for key, allowed in neutral.items():
            if key not in self:
                continue
            value = self._values[self._prefix + key]
            if not isinstance(value, bool | int | float | str) or value not in allowed:
                raise UnsupportedModelError(
                    f"{self.name(key)} is {_shown(value)}; octavo does not implement this option of a model"
                )

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.name(key)} is missing")
        return default


def _shown(value: Any) -> str:
    """A value as it may appear in a message: short, whatever the file holds."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
