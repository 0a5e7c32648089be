"""Makes a GGUF file of random weights in the shape of a Llama: for speed at real sizes, and for tests, without a download.

It says nothing worth reading, but every engine that reads GGUF runs it as fast as a real model of its shape. The tokenizer works: it
is that of another model, or a small byte-level one. Files are made in chunks of some megabytes and appear whole.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.bench.local.random_weights import embedding_format, random_rows
from octavo.errors import ConfigError
from octavo.loaders.checkpoint import open_checkpoint
from octavo.loaders.gguf_writer import TensorShape, stream_gguf
from octavo.models import ModelSpec, find_family
from octavo.ops import Rope, RopeStyle
from octavo.quant import Format
from octavo.runner.load import read_spec
from octavo.text.vocabulary import byte_level_alphabet

FORMATS = (Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.BF16, Format.F16)
_FILE_TYPES = {Format.F16: 1, Format.Q4_0: 2, Format.Q4_1: 3, Format.Q8_0: 7, Format.BF16: 32}
"""`general.file_type` of the GGUF specification, without which OpenVINO GenAI refuses a file."""
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_NORMAL, _CONTROL = 1, 3
_ARRAY_TYPES = {"tokenizer.ggml.token_type": np.int32, "tokenizer.ggml.scores": np.float32}
"""The types that llama.cpp insists on."""
_SPACE = "Ġ"

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. None is taken from the model that it shall be like."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    context: int | None = None


def synthesize(
    path: Path,
    shape: Shape,
    *,
    form: Format = Format.Q4_0,
    like: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Writes the file and returns its number of parameters. Equal arguments give equal bytes.

    Embedding and head share one matrix, in 8 bits beside 4-bit formats. `like`: a GGUF model that gives missing sizes, tokenizer and
    rotary base. Raises ConfigError for sizes that are missing or do not fit together, and what opening `like` raises.
    """
    metadata, spec = _describe(shape, form, like)
    tensors = _tensors(spec, form)
    total, done = sum(tensor.num_bytes for tensor in tensors), 0

    def chunks(index: int) -> Iterator[npt.NDArray[np.uint8]]:
        nonlocal done
        tensor = tensors[index]
        if len(tensor.shape) == 1:
            parts = iter((np.ones(tensor.shape, np.float32).view(np.uint8),))
        else:
            rows, k = tensor.shape
            parts = random_rows(tensor.format, rows, k, seed=(seed, index))
        for part in parts:
            yield part
            done += len(part)
            if progress is not None:
                progress(done, total)

    unfinished = path.with_name(path.name + ".part")
    try:
        stream_gguf(unfinished, metadata | {"general.name": path.stem}, tensors, chunks)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return sum(int(np.prod(tensor.shape)) for tensor in tensors)


def _describe(shape: Shape, form: Format, like: str | None) -> tuple[dict[str, Any], ModelSpec]:
    """Metadata and spec of the file."""
    given = {name: value for name, value in msgspec.structs.asdict(shape).items() if value is not None}
    tokenizer: dict[str, Any] = {}
    base, eps = 10000.0, 1e-5
    if like is not None:
        checkpoint = open_checkpoint(like)
        if checkpoint.kind != "gguf":
            raise ConfigError(f"--like must name a GGUF model, which {like} is not", param="like")
        spec = read_spec(checkpoint)
        given = _sizes_of(spec) | given
        base = float(checkpoint.metadata.get(f"{checkpoint.architecture}.rope.freq_base", base))
        eps = spec.norm_eps
        tokenizer = {key: value for key, value in checkpoint.metadata.items() if key.startswith("tokenizer.")}
    if missing := [name for name in Shape.__struct_fields__ if name not in given]:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"sizes are missing: give {flags}, or --like MODEL", param=missing[0])
    sizes = {name: int(value) for name, value in given.items()}
    _check(sizes, form)
    tokenizer = _resized(tokenizer, sizes["vocab"]) if tokenizer else byte_level_tokenizer(sizes["vocab"])
    facts = {
        "general.architecture": "llama",
        "general.file_type": _FILE_TYPES[form],
        "general.quantization_version": 2,
        "llama.block_count": sizes["layers"],
        "llama.context_length": sizes["context"],
        "llama.embedding_length": sizes["hidden"],
        "llama.feed_forward_length": sizes["ffn"],
        "llama.attention.head_count": sizes["heads"],
        "llama.attention.head_count_kv": sizes["kv_heads"],
        "llama.attention.key_length": sizes["head_dim"],
        "llama.attention.value_length": sizes["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(eps),
        "llama.rope.freq_base": base,
        "llama.rope.dimension_count": sizes["head_dim"],
        "llama.vocab_size": sizes["vocab"],
    }
    for key, kind in _ARRAY_TYPES.items():
        if key in tokenizer:
            tokenizer[key] = np.array(tokenizer[key], kind)
    return facts | tokenizer, _spec(sizes, eps)


def _sizes_of(spec: ModelSpec) -> dict[str, int]:
    return {
        "layers": spec.num_layers,
        "hidden": spec.hidden,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": spec.vocab_size,
        "context": spec.max_context,
    }


def _spec(sizes: Mapping[str, int], eps: float) -> ModelSpec:
    """Only names and shapes are taken from it; the rotary embedding is the metadata's."""
    rope = Rope(head_dim=sizes["head_dim"], style=RopeStyle.INTERLEAVED, inverse_frequencies=())
    return ModelSpec(
        family="llama",
        num_layers=sizes["layers"],
        hidden=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        ffn=sizes["ffn"],
        vocab_size=sizes["vocab"],
        max_context=sizes["context"],
        norm_eps=eps,
        rope=rope,
        tied_head=True,
    )


def _check(sizes: Mapping[str, int], form: Format) -> None:
    if form not in FORMATS:
        raise ConfigError(f"--format is {form.value}; it may be {', '.join(FORMATS)}", param="format")
    for name, size in sizes.items():
        flag = "--" + name.replace("_", "-")
        if not 1 <= size <= 2**24:
            raise ConfigError(f"{flag} is {size}; it must be in 1..{2**24}", param=name)
    block = max(form.block, embedding_format(form).block)
    for name, width in (
        ("hidden", sizes["hidden"]),
        ("ffn", sizes["ffn"]),
        ("heads", sizes["heads"] * sizes["head_dim"]),
    ):
        if width % block:
            raise ConfigError(
                f"rows of {width} weights cannot be stored in {form.value}: choose a multiple of {block}", param=name
            )
    if sizes["heads"] % sizes["kv_heads"]:
        raise ConfigError("--heads must be a multiple of --kv-heads", param="kv_heads")
    if sizes["head_dim"] % 2:
        raise ConfigError("--head-dim must be even", param="head_dim")


def _tensors(spec: ModelSpec, form: Format) -> list[TensorShape]:
    names = find_family("gguf", "llama").gguf_names(spec)
    tensors = []
    for canonical, shape in spec.weight_shapes().items():
        used = embedding_format(form) if canonical == "embed" else form
        tensors.append(TensorShape(names[canonical], shape, Format.F32 if len(shape) == 1 else used))
    return tensors


def byte_level_tokenizer(vocab: int) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: control tokens, bytes, pairs of lower-case letters with their merges, and words that only
    the model says. Raises ConfigError when the vocabulary is too small for them.
    """
    letters = string.ascii_lowercase
    tokens = [*_CONTROLS, *byte_level_alphabet()]
    room = vocab - len(tokens)
    if room < 1:
        raise ConfigError(f"--vocab is {vocab}; a byte-level tokenizer needs at least {len(tokens) + 1}", param="vocab")
    merges = [f"{first} {second}" for first, second in itertools.product(_SPACE + letters, letters)][:room]
    tokens += [merge.replace(" ", "") for merge in merges]
    lengths = (itertools.product(letters, repeat=length) for length in itertools.count(3))
    words = (_SPACE + "".join(word) for word in itertools.chain.from_iterable(lengths))
    tokens += itertools.islice(words, vocab - len(tokens))
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [_CONTROL] * len(_CONTROLS) + [_NORMAL] * (vocab - len(_CONTROLS)),
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()} | {
        "tokenizer.chat_template": _CHAT_TEMPLATE
    }


def _resized(tokenizer: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Another model's tokenizer with tokens added that only the model says. Raises ConfigError when it has too many."""
    resized = {key: value for key, value in tokenizer.items() if not (isinstance(value, list) and not value)}
    tokens: list[str] = resized["tokenizer.ggml.tokens"]
    extra = vocab - len(tokens)
    if extra < 0:
        raise ConfigError(f"--vocab is {vocab}, but the tokenizer of --like has {len(tokens)} tokens", param="vocab")
    if extra:
        resized["tokenizer.ggml.tokens"] = [*tokens, *(f"{_SPACE}word{number}" for number in range(extra))]
        for key, filler in (("token_type", _NORMAL), ("scores", -1e9)):
            if f"tokenizer.ggml.{key}" in resized:
                resized[f"tokenizer.ggml.{key}"] = [*resized[f"tokenizer.ggml.{key}"], *[filler] * extra]
    return resized
