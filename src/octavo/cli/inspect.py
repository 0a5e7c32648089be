"""`octavo inspect MODEL`: what a model is, and what of it fits this machine. Loads no weights."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelFileError

if TYPE_CHECKING:
    from octavo.backends.base import KVFormat
    from octavo.loaders.checkpoint import Checkpoint
    from octavo.models.spec import ModelSpec


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("inspect", help="show what a model is and what of it fits", description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", help="catalogue name, .gguf file, Hugging Face folder or repository id"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face repository")
    parser.add_argument(
        "--kv-cache-dtype", choices=("bfloat16", "int8"), default="bfloat16", help="what the KV cache would be kept as"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the facts. Returns 1 for a model that octavo cannot serve, after telling what is known of it."""
    from octavo.loaders.checkpoint import open_checkpoint

    facts = describe(open_checkpoint(arguments.model, revision=arguments.revision), arguments.kv_cache_dtype)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name.removesuffix('_bytes').replace('_', ' '):<22} {_shown(name, value)}")
    return 0 if facts["supported"] else 1


def describe(checkpoint: Checkpoint, kv_format: KVFormat = "bfloat16") -> dict[str, Any]:
    """Facts of a model, JSON-ready. Sizes are in bytes, None where the architecture is not known."""
    from octavo.obs.machine import free_memory_bytes, total_memory_bytes

    spec, problem = _spec(checkpoint)
    by_format: Counter[str] = Counter()
    for tensor in checkpoint.tensors.supported.values():
        by_format[tensor.format.name] += tensor.format.num_bytes(math.prod(tensor.shape))
    free = free_memory_bytes()
    facts: dict[str, Any] = {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "supported": problem is None,
        "problem": problem,
        "architecture": _architecture(checkpoint),
        "file_bytes": checkpoint.file_bytes,
        "parameters": sum(math.prod(shape) for shape in checkpoint.tensors.shapes.values()),
        "bytes_by_format": dict(by_format.most_common()),
        "unsupported_tensors": dict(Counter(checkpoint.unsupported.values()).most_common()),
        "tokenizer": _tokenizer(checkpoint),
        "chat_template": checkpoint.chat_template is not None,
        "memory_total_bytes": total_memory_bytes(),
        "memory_free_bytes": free,
        "weights_fit": sum(by_format.values()) <= free,
    }
    if spec is not None:
        facts |= _shape_facts(spec, free - sum(by_format.values()), kv_format)
    return facts


def _shape_facts(spec: ModelSpec, memory_for_kv: int, kv_format: KVFormat) -> dict[str, Any]:
    """Sizes of the model, and how many tokens of KV in this format the memory left beside its weights holds."""
    from octavo.backends.base import KV_BYTES

    groups = spec.kv_groups(*KV_BYTES[kv_format])
    per_token = sum(group.bytes_per_token for group in groups)
    tokens = max(0, memory_for_kv) // per_token
    return {
        "layers": spec.num_layers,
        "hidden": spec.hidden,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocabulary": spec.vocab_size,
        "context": spec.max_context,
        "windows": sorted({group.window for group in groups if group.window is not None}),
        "tied_head": spec.tied_head,
        "kv_bytes_per_token": per_token,
        "kv_bytes_full_context": per_token * spec.max_context,
        "kv_tokens_that_fit": tokens,
        "full_contexts_that_fit": tokens // spec.max_context,
    }


def _spec(checkpoint: Checkpoint) -> tuple[ModelSpec | None, str | None]:
    """(spec, why the model cannot be served). Both are there when only some tensors cannot be used."""
    from octavo.models.families import find_family

    spec = None
    try:
        family = find_family(checkpoint.kind, checkpoint.architecture)
        if checkpoint.kind == "gguf":
            spec = family.from_gguf(checkpoint.metadata, checkpoint.tensors)
            names = family.gguf_names(spec)
        else:
            spec = family.from_hf(checkpoint.metadata)
            names = family.hf_names(spec)
        for name in names.values():
            if name not in checkpoint.tensors:
                raise ModelFileError(f"tensor {name} is missing")
            _ = checkpoint.tensors[name]
    except ModelFileError as error:
        return spec, error.message
    return spec, None


def _architecture(checkpoint: Checkpoint) -> str | None:
    try:
        return checkpoint.architecture
    except ModelFileError:
        return None


def _tokenizer(checkpoint: Checkpoint) -> str | None:
    """What kind of tokenizer the model brings, None without one."""
    if checkpoint.kind == "hf":
        return None if checkpoint.tokenizer_json is None else "tokenizer.json"
    model, pre = (checkpoint.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if not isinstance(model, str):
        return None
    return f"{model} ({pre})" if isinstance(pre, str) else model


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        is_bytes = name.startswith("bytes")
        return ", ".join(f"{key} {_size(n) if is_bytes else n}" for key, n in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int):
        return _size(value) if "bytes" in name else f"{value:,}"
    return "none" if value is None else str(value)


def _size(num_bytes: int) -> str:
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:.1f} {unit}"
    return f"{num_bytes} B"
