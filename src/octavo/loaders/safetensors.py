"""Reads a Hugging Face folder: config.json, safetensors weights, tokenizer, chat template, generation defaults.

Nothing in the folder is executed: code that a repository brings (`auto_map`) is never looked at. Files are untrusted and
checked like GGUF files. Source of the weight format: the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from octavo.errors import ModelFileError, ModelUnavailableError, UnsupportedModelError
from octavo.loaders.tensors import Tensors, map_file, shown
from octavo.quant import Format, RawTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 8

_FORMATS = {"F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}
_OTHER_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of types that are recognised but not computed with."""


class SafetensorsFile(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed file. header: its JSON."""

    tensors: Tensors
    header: bytes
    file_bytes: int


class HFFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What a Hugging Face folder says.

    tokenizer_json: the file's bytes, None when there is none. weight_files: those that hold the tensors.
    identity: bytes of config and headers that tell models apart.
    """

    config: Mapping[str, Any]
    tensors: Tensors
    tokenizer_json: bytes | None
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    identity: bytes
    file_bytes: int


def read_folder(folder: Path) -> HFFolder:
    """Reads and checks a folder with config.json and safetensors weights.

    Raises ModelFileError, ModelUnavailableError, and UnsupportedModelError for quantized checkpoints and for weights that
    are kept in other formats.
    """
    config_bytes = _bytes(folder / "config.json", MAX_JSON_BYTES)
    if config_bytes is None:
        raise ModelFileError(_not_a_model(folder), param=folder.name)
    config = parse_config(config_bytes)
    places = weight_files(folder)
    files = {name: read_safetensors(folder / name) for name in sorted(set(places.values()))}
    tokenizer_config = _object(folder / "tokenizer_config.json")
    return HFFolder(
        config=config,
        tensors=_placed_tensors(places, files),
        tokenizer_json=_bytes(folder / "tokenizer.json", MAX_TOKENIZER_BYTES),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        generation_config=_object(folder / "generation_config.json"),
        weight_files=tuple(folder / name for name in files),
        identity=config_bytes + b"".join(file.header for file in files.values()),
        file_bytes=sum(file.file_bytes for file in files.values()),
    )


def read_safetensors(path: Path) -> SafetensorsFile:
    """Maps and checks one file: sizes match types and shapes, and the data section is covered without gap or overlap.

    Raises ModelFileError, ModelUnavailableError.
    """
    data = map_file(path)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"its header of {length} bytes is longer than the file or than {MAX_HEADER_BYTES} bytes")
    header = data[8 : 8 + length]
    entries = _entries(path, header)
    start = 8 + length
    content = np.frombuffer(data, dtype=np.uint8)[start:]

    supported: dict[str, RawTensor] = {}
    unsupported: dict[str, str] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = _placed(path, name, entry, end)
        if form := _FORMATS.get(entry.dtype):
            supported[name] = RawTensor(name, entry.shape, form, content[begin:end])
        else:
            unsupported[name] = entry.dtype
    if end != len(content):
        raise _damaged(path, f"its tensors take {end} bytes, but {len(content)} follow the header; is it complete?")
    shapes = {name: entry.shape for name, entry in entries.items()}
    return SafetensorsFile(tensors=Tensors(supported, unsupported, shapes), header=header, file_bytes=len(data))


def parse_config(content: bytes) -> dict[str, Any]:
    """config.json as a dict. Raises ModelFileError, and UnsupportedModelError when the checkpoint is quantized."""
    config = _json_object("config.json", content)
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        raise UnsupportedModelError(
            f"config.json: quantized checkpoints (quantization_config, method {shown(str(method))}) are not supported; "
            "use the unquantized model or a GGUF file",
            param="quantization_config",
        )
    return config


def weight_files(folder: Path) -> dict[str, str]:
    """Where each tensor is, by the index: tensor name -> file name. Without an index, "" -> the one file.

    Raises ModelFileError for an index that names anything but files of the folder itself.
    """
    index = _bytes(folder / INDEX, MAX_JSON_BYTES)
    if index is None:
        if not (folder / WEIGHTS).exists():
            raise ModelFileError(_not_a_model(folder), param=folder.name)
        return {"": WEIGHTS}
    weight_map = _json_object(INDEX, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{INDEX}: weight_map must be an object that names a file for each tensor", param=INDEX)
    for file_name in set(map(str, weight_map.values())):
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors") or "\0" in file_name:
            raise ModelFileError(
                f"{INDEX}: {shown(file_name)} is not the name of a safetensors file in this folder", param=INDEX
            )
    return {name: str(file_name) for name, file_name in weight_map.items()}


_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    """The header's tensors, typed. Each value stays raw bytes until it is checked, so that memory is bounded."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(path, f"its header is not what the format asks for: {str(error)[:200]}") from error


def _placed(path: Path, name: str, entry: _Entry, expected: int) -> tuple[int, int]:
    """The entry's byte range, which must begin at `expected` and be as long as its shape says."""
    begin, end = entry.data_offsets
    if begin != expected:
        raise _damaged(path, f"tensor {shown(name)} begins at {begin}, expected {expected}: a gap or an overlap")
    form = _FORMATS.get(entry.dtype)
    size = form.block_bytes if form else _OTHER_BYTES.get(entry.dtype)
    if end < begin or (size is not None and end - begin != math.prod(entry.shape) * size):
        raise _damaged(path, f"tensor {shown(name)} takes {end - begin} bytes, which does not fit its shape and type")
    return begin, end


def _placed_tensors(places: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> Tensors:
    """The tensors of all files, each from the file that the index names."""
    if "" in places:
        return files[places[""]].tensors
    supported: dict[str, RawTensor] = {}
    unsupported: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, file_name in places.items():
        tensors = files[file_name].tensors
        if name not in tensors:
            raise ModelFileError(f"{INDEX}: tensor {shown(name)} is not in {shown(file_name)}", param=INDEX)
        shapes[name] = tensors.shapes[name]
        if name in tensors.supported:
            supported[name] = tensors.supported[name]
        else:
            unsupported[name] = tensors.unsupported[name]
    return Tensors(supported, unsupported, shapes)


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config's: one string, or a list of named ones with a "default"."""
    file = _bytes(folder / "chat_template.jinja", MAX_JSON_BYTES)
    if file is not None:
        try:
            return file.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError("chat_template.jinja: not UTF-8", param="chat_template.jinja") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelFileError("tokenizer_config.json: chat_template must be a string", param="tokenizer_config.json")
    return template


def _object(path: Path) -> dict[str, Any]:
    """An optional JSON file: {} when there is none."""
    content = _bytes(path, MAX_JSON_BYTES)
    return {} if content is None else _json_object(path.name, content)


def _json_object(file_name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file_name}: not JSON: {error}", param=file_name) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{file_name}: expected a JSON object", param=file_name)
    return value


def _bytes(path: Path, most: int) -> bytes | None:
    """A file's content, None when there is none."""
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > most:
            raise ModelFileError(f"{path.name}: not a file of at most {most} bytes", param=path.name)
        return path.read_bytes()
    except OSError as error:
        raise ModelUnavailableError(f"cannot read {path}: {error.strerror}", param=path.name) from error


def _not_a_model(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelUnavailableError(f"cannot read {folder}: {error.strerror}", param=folder.name) from error
    expected = f"expected config.json with {WEIGHTS} or {INDEX}"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder.name}: {expected}, but the folder holds GGUF files; name one of them: {', '.join(gguf[:10])}"
    if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        return f"{folder.name}: {expected}; pickled weights are not read, since they can run code: convert them"
    return f"{folder.name}: not a model folder: {expected}"


def _damaged(path: Path, message: str) -> ModelFileError:
    return ModelFileError(f"{path.name}: {message}", param=path.name)
