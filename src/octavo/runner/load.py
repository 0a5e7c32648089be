"""From an opened checkpoint to a loaded model: family, spec, checked tensors, backend. Knows no paths, requests or text.

Everything that can be refused is refused by name before the backend allocates anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from octavo.backends.base import Backend, BackendModel, DType, KVDType, Progress
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.loaders.checkpoint import Checkpoint
from octavo.models import ModelSpec, find_family, make_forward
from octavo.quant import RawTensor


class LoadedModel(msgspec.Struct, frozen=True):
    """A model on a backend. The owner of `model` closes it."""

    spec: ModelSpec
    model: BackendModel


def load_model(
    checkpoint: Checkpoint,
    backend: Backend,
    *,
    dtype: DType = "auto",
    kv_dtype: KVDType = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a checkpoint's weights into a backend.

    Raises UnsupportedModelError for an architecture, option or tensor type that octavo does not have, ModelFileError for
    missing tensors, wrong shapes and wrong values, and what `Backend.load` raises.
    """
    spec = read_spec(checkpoint)
    tensors = canonical_tensors(checkpoint, spec)
    model = backend.load(make_forward(spec), tensors, dtype=dtype, kv_dtype=kv_dtype, progress=progress)
    return LoadedModel(spec, model)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint, without looking at its weights."""
    family = find_family(checkpoint.kind, checkpoint.architecture)
    if checkpoint.kind == "gguf":
        return family.from_gguf(checkpoint.metadata, checkpoint.tensors)
    return family.from_hf(checkpoint.metadata)


def canonical_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, RawTensor]:
    """Exactly the tensors that the spec needs, by canonical name, their shapes and formats checked."""
    family = find_family(checkpoint.kind, checkpoint.architecture)
    names = family.gguf_names(spec) if checkpoint.kind == "gguf" else family.hf_names(spec)
    return {
        canonical: _checked(checkpoint.tensors, names[canonical], shape)
        for canonical, shape in spec.weight_shapes().items()
    }


def content_digest(checkpoint: Checkpoint, spec: ModelSpec) -> bytes:
    """SHA-256 over all that decides a model's results: its spec, and names, shapes, formats and bytes of its weights. Reads them all."""
    tensors = canonical_tensors(checkpoint, spec)

    def digest(name: str) -> bytes:
        tensor = tensors[name]
        own = hashlib.sha256(f"{name} {tensor.shape} {tensor.format.name}\n".encode())
        own.update(np.ascontiguousarray(tensor.data).data)
        return own.digest()

    with ThreadPoolExecutor() as pool:  # hashing goes on without the GIL
        parts = pool.map(digest, sorted(tensors))
        whole = hashlib.sha256(repr(spec).encode())
        for part in parts:
            whole.update(part)
    return whole.digest()


def _checked(tensors: Mapping[str, RawTensor], name: str, shape: tuple[int, ...]) -> RawTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"tensor {name} is missing", param=name)
    if tensor.shape != shape:
        raise ModelFileError(
            f"tensor {name} has shape {list(tensor.shape)}; the model's sizes ask for {list(shape)}", param=name
        )
    if len(shape) == 1 and tensor.format.quantized:
        raise UnsupportedModelError(
            f"tensor {name} is a vector of type {tensor.format.name}; octavo has vectors of F32, F16 and BF16",
            param=name,
        )
    return tensor
