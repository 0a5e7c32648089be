"""A model's files, opened: whatever a user may name as a model becomes one `Checkpoint`. Does not know what tensors mean."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.errors import ConfigError, ModelFileError, ModelUnavailableError
from octavo.loaders import catalogue, hub
from octavo.loaders.gguf import read_gguf
from octavo.loaders.safetensors import read_folder
from octavo.loaders.tensors import Tensors

CheckConfig = Callable[[Mapping[str, Any]], None]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a model's files say.

    name: short, for clients to see. metadata: key-values of a GGUF file, or config.json. tensors: under the names of the
    files; those of unsupported types are contained but cannot be taken. tokenizer_json, tokenizer_config,
    generation_config: of a Hugging Face folder, else None and empty. digest: SHA-256 over the headers (GGUF header, or
    config.json and safetensors headers) and the size and modification time of each weight file: it tells weights apart
    without reading them, and trusts that a file whose content changes gets another time. file_bytes: size of all weights.
    """

    name: str
    kind: Literal["gguf", "hf"]
    path: Path
    metadata: Mapping[str, Any]
    tensors: Tensors
    tokenizer_json: bytes | None
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    generation_config: Mapping[str, Any]
    digest: bytes
    file_bytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, or the first of config.json's `architectures`. Raises ModelFileError without one."""
        if self.kind == "gguf":
            source, architecture = "general.architecture", self.metadata.get("general.architecture")
        else:
            source, names = "config.json's architectures", self.metadata.get("architectures")
            architecture = names[0] if isinstance(names, list) and names else None
        if not isinstance(architecture, str):
            raise ModelFileError(f"{self.path.name}: {source} does not name an architecture", param=source)
        return architecture

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Tensors in types that octavo does not compute with: name -> type."""
        return self.tensors.unsupported


def open_checkpoint(
    reference: str,
    *,
    revision: str | None = None,
    progress: bool = True,
    offline: bool | None = None,
    check_config: CheckConfig | None = None,
) -> Checkpoint:
    """Opens a catalogue name, a .gguf file, a Hugging Face folder or a repository id, in this order; fetches if needed.

    A repository is `owner/name`, or `owner/name:file.gguf` for one GGUF file of it; `revision` is a branch, tag or commit
    and only repositories have one. `progress` shows bars on a terminal. `offline`: take what is cached and open no
    connection; None asks HF_HUB_OFFLINE. `check_config` is called with config.json of a repository before its weights are
    downloaded, and may raise. Raises ModelUnavailableError, ModelFileError, UnsupportedModelError.
    """
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    path = Path(reference).expanduser()
    repository = hub.parse_reference(reference)
    is_local = reference in catalogue.CATALOGUE or (reference != "" and _exists(path))
    if revision is not None and (is_local or repository is None):
        raise ConfigError(
            f"revision {revision!r} applies to Hugging Face repositories, not to {reference!r}", param="revision"
        )
    if reference in catalogue.CATALOGUE:
        return open_gguf(catalogue.ensure(reference, progress=progress, offline=offline), name=reference)
    if is_local:
        return open_folder(path, name=path.resolve().name) if path.is_dir() else open_gguf(path, name=path.stem)
    if repository is None:
        raise _not_found(reference)
    if repository.file is not None:
        file = hub.fetch_file(
            repository.repository, repository.file, revision=revision, offline=offline, progress=progress
        )
        return open_gguf(file, name=repository.repository)
    folder = hub.fetch_repository(
        repository.repository, revision=revision, offline=offline, progress=progress, check_config=check_config
    )
    return open_folder(folder, name=repository.repository)


def open_gguf(path: Path, *, name: str) -> Checkpoint:
    """Opens one GGUF file. Raises as `read_gguf` does."""
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path.name} is only the weights of a model; name its folder instead", param="model")
    file = read_gguf(path)
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        name=name,
        kind="gguf",
        path=path,
        metadata=file.metadata,
        tensors=file.tensors,
        tokenizer_json=None,
        tokenizer_config={},
        chat_template=template if isinstance(template, str) else None,
        generation_config={},
        digest=_digest(file.header, [path]),
        file_bytes=file.file_bytes,
    )


def open_folder(path: Path, *, name: str) -> Checkpoint:
    """Opens a Hugging Face folder. Raises as `read_folder` does."""
    folder = read_folder(path)
    return Checkpoint(
        name=name,
        kind="hf",
        path=path,
        metadata=folder.config,
        tensors=folder.tensors,
        tokenizer_json=folder.tokenizer_json,
        tokenizer_config=folder.tokenizer_config,
        chat_template=folder.chat_template,
        generation_config=folder.generation_config,
        digest=_digest(folder.identity, folder.weight_files),
        file_bytes=folder.file_bytes,
    )


def _digest(headers: bytes | memoryview, weight_files: Iterable[Path]) -> bytes:
    digest = hashlib.sha256(headers)
    for path in weight_files:
        status = path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.digest()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def _not_found(reference: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"model {reference[:200]!r} was not found: it is no catalogue name ({', '.join(catalogue.CATALOGUE)}), no file or "
        f"folder that exists, and no Hugging Face repository id (owner/name){catalogue.did_you_mean(reference)}",
        param="model",
    )
