"""Backends by name. The chosen one is imported on demand, so that the others cost nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.config import BackendConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.backends.base import Backend

_log = logging.getLogger("octavo")


def make_backend(config: BackendConfig) -> Backend:
    """The configured backend. `auto` is cpu, or numpy with a warning where octavo was built without its native module.

    Raises ConfigError when cpu is asked for but not built, or threads are given for numpy.
    """
    name = config.backend
    if name != "numpy":
        try:
            from octavo.backends.cpu.backend import CpuBackend

            return CpuBackend(threads=config.threads)
        except ImportError as error:
            if name == "cpu":
                raise ConfigError(
                    f"backend cpu cannot be loaded: {error}; reinstall octavo, or use --backend numpy", param="backend"
                ) from error
            _log.warning("the native module cannot be loaded (%s); using the slow numpy backend", error)
    if config.threads is not None:
        raise ConfigError("threads apply to the cpu backend only; the numpy backend has none", param="threads")
    from octavo.backends.numpy.backend import NumpyBackend

    return NumpyBackend()
