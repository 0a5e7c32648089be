"""From an opened checkpoint to a loaded model: family, spec, checked tensors, backend. Knows no paths, requests or text.

Everything that can be refused is refused by name before the backend allocates anything.
"""

from __future__ import annotations

import msgspec

from octavo.backends.base import Backend, BackendModel, DType, Progress
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.loaders.checkpoint import Checkpoint
from octavo.models import ModelSpec, find_family, make_forward
from octavo.models.spec import Family
from octavo.quant import Format, RawTensor


class LoadedModel(msgspec.Struct, frozen=True):
    """A model on a backend. The owner of `model` closes it."""

    spec: ModelSpec
    model: BackendModel


def load_model(
    checkpoint: Checkpoint, backend: Backend, *, dtype: DType = "auto", progress: Progress | None = None
) -> LoadedModel:
    """Loads a checkpoint's weights into a backend. Its files may be closed afterwards only if the backend says so.

    Raises UnsupportedModelError for an architecture, option, tensor type or dtype that octavo does not have, and
    ModelFileError for missing tensors, wrong shapes and wrong values.
    """
    spec = read_spec(checkpoint)
    tensors = canonical_tensors(checkpoint, spec)
    return LoadedModel(spec, backend.load(make_forward(spec), tensors, dtype=dtype, progress=progress))


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint, without looking at its weights."""
    family = _family(checkpoint)
    if checkpoint.kind == "gguf":
        return family.from_gguf(checkpoint.metadata, checkpoint.tensors)
    return family.from_hf(checkpoint.metadata)


def canonical_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, RawTensor]:
    """Exactly the tensors the spec needs, by canonical name, their shapes and formats checked."""
    family = _family(checkpoint)
    names = family.gguf_names(spec) if checkpoint.kind == "gguf" else family.hf_names(spec)
    return {
        canonical: _checked(checkpoint, names[canonical], shape) for canonical, shape in spec.weight_shapes().items()
    }


def _family(checkpoint: Checkpoint) -> Family:
    if checkpoint.kind == "gguf":
        architecture = checkpoint.metadata.get("general.architecture")
        key = "GGUF key general.architecture"
    else:
        architectures = checkpoint.metadata.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else None
        key = "config.json key architectures"
    if not isinstance(architecture, str):
        raise ModelFileError(f"{key} does not name the model's architecture")
    return find_family(checkpoint.kind, architecture)


def _checked(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> RawTensor:
    if name in checkpoint.unsupported:
        known = ", ".join(form.name for form in Format)
        raise UnsupportedModelError(
            f"tensor {name} has type {checkpoint.unsupported[name]}, which octavo does not implement; it has {known}"
        )
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"tensor {name} is missing")
    if tensor.shape != shape:
        raise ModelFileError(f"tensor {name} has shape {list(tensor.shape)}; the model's sizes ask for {list(shape)}")
    if len(shape) == 1 and tensor.format.quantized:
        raise UnsupportedModelError(
            f"tensor {name} is a vector of type {tensor.format.name}; expected F32, F16 or BF16"
        )
    return tensor
