"""Choosing a backend by configuration."""

from __future__ import annotations

import logging
import sys

import pytest

from octavo.backends import make_backend
from octavo.config import BackendConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(("asked", "got"), [("auto", "cpu"), ("cpu", "cpu"), ("numpy", "numpy")])
def test_by_name(asked: str, got: str) -> None:
    assert make_backend(BackendConfig(backend=asked)).name == got  # type: ignore[arg-type]


def test_threads_are_for_cpu_only() -> None:
    assert make_backend(BackendConfig(backend="cpu", threads=1)).name == "cpu"
    with pytest.raises(ConfigError, match="threads"):
        make_backend(BackendConfig(backend="numpy", threads=1))


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "octavo.backends.cpu.backend", None)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert make_backend(BackendConfig()).name == "numpy"
    assert "numpy" in caplog.text
    with pytest.raises(ConfigError, match="cpu"):
        make_backend(BackendConfig(backend="cpu"))
    with pytest.raises(ConfigError, match="threads"):
        make_backend(BackendConfig(threads=2))
