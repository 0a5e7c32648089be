"""The readable float32 reference backend."""

from octavo.backends.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
