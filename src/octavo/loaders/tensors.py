"""The tensors of a checkpoint under the names its files give them, and how those files are mapped."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.errors import ModelFileError, ModelUnavailableError, UnsupportedModelError
from octavo.quant import Format, RawTensor


class Tensors(Mapping[str, RawTensor]):
    """All tensors of a checkpoint by name. Data are views of mapped files, which stay open as long as any view lives.

    A tensor in a format that octavo does not compute with is contained, listed and counted like the others, so that a
    model never mistakes it for absent, but taking it raises UnsupportedModelError, which names it and its type.
    """

    def __init__(
        self,
        supported: Mapping[str, RawTensor],
        unsupported: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._supported = supported
        self._unsupported = unsupported
        self._shapes = shapes

    @property
    def supported(self) -> Mapping[str, RawTensor]:
        """Those that octavo can compute with."""
        return self._supported

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Type names of the others, as their file format spells them."""
        return self._unsupported

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all, in C order ([out, in] for matrices)."""
        return self._shapes

    def __getitem__(self, name: str) -> RawTensor:
        if name in self._unsupported:
            formats = ", ".join(form.name for form in Format)
            raise UnsupportedModelError(
                f"tensor {shown(name)} has type {self._unsupported[name]}, which is not supported; octavo has {formats}",
                param=name,
            )
        return self._supported[name]

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def map_file(path: Path) -> mmap.mmap:
    """A read-only map of a regular, non-empty file. Raises ModelUnavailableError, ModelFileError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(f"{path.name}: not a regular file", param=path.name)
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelUnavailableError(f"cannot read {path}: {error.strerror}", param=path.name) from error
    except ValueError as error:
        raise ModelFileError(f"{path.name}: the file is empty", param=path.name) from error


def shown(name: str) -> str:
    """A name from a file as an error message may show it: quoted, escaped, one line, not too long."""
    return ascii(name if len(name) <= 100 else name[:97] + "...")
