"""The registry of model families: which one reads a checkpoint."""

from __future__ import annotations

from typing import Literal

from octavo.errors import UnsupportedModelError
from octavo.models.families.llama import Llama, Mistral
from octavo.models.families.qwen2 import Qwen2
from octavo.models.spec import Family

FAMILIES: tuple[Family, ...] = (Llama(), Mistral(), Qwen2())


def find_family(kind: Literal["gguf", "hf"], architecture: str) -> Family:
    """The family that takes `general.architecture` of a GGUF file, or `architectures[0]` of a config.json.

    Raises UnsupportedModelError naming the architecture and those that octavo has.
    """
    known: list[str] = []
    for family in FAMILIES:
        names = family.gguf_architectures if kind == "gguf" else family.hf_architectures
        if architecture in names:
            return family
        known += names
    raise UnsupportedModelError(f"architecture {architecture[:80]!r} is not supported; octavo has {', '.join(known)}")
