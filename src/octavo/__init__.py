"""Octavo: an LLM inference server that gives the same bits whatever the load.

`from octavo import LLM, SamplingParams` is the offline interface; `octavo serve` the server. Imports are lazy, so that the command
line starts in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.frontend.beams import BeamSearchParams as BeamSearchParams
    from octavo.frontend.llm import LLM as LLM
    from octavo.frontend.outputs import CompletionOutput as CompletionOutput
    from octavo.frontend.outputs import RequestOutput as RequestOutput
    from octavo.frontend.params import SamplingParams as SamplingParams
    from octavo.frontend.structured import StructuredOutputsParams as StructuredOutputsParams

__version__: str

_LAZY = {
    "LLM": "octavo.frontend.llm",
    "SamplingParams": "octavo.frontend.params",
    "StructuredOutputsParams": "octavo.frontend.structured",
    "BeamSearchParams": "octavo.frontend.beams",
    "RequestOutput": "octavo.frontend.outputs",
    "CompletionOutput": "octavo.frontend.outputs",
}
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value = globals()["__version__"] = version("octavo")  # once: a running server opens no files
        return value
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
