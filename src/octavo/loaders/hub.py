"""Fetches models from the Hugging Face hub with `huggingface_hub`: its cache, its progress bars, its environment variables.

The library is imported on first use, since that takes longer than everything else at start-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from octavo.errors import ModelUnavailableError
from octavo.loaders.safetensors import parse_config, weight_files

T = TypeVar("T")

_SMALL_FILES = ["*.json", "*.jinja"]
_REFERENCE = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(?:[:/](?P<file>[\w./-]+\.gguf))?", re.ASCII)


class HubReference(NamedTuple):
    """A repository, or one GGUF file of it."""

    repository: str
    file: str | None


def parse_reference(reference: str) -> HubReference | None:
    """Reads `owner/name`, `owner/name:file.gguf` or `owner/name/file.gguf`; None if it is nothing of the kind."""
    match = _REFERENCE.fullmatch(reference)
    if match is None or (match["file"] is None and reference.endswith(".gguf")):
        return None
    return HubReference(match["id"], match["file"])


def fetch_repository(
    repository: str,
    *,
    revision: str | None,
    offline: bool,
    progress: bool,
    check_config: Callable[[Mapping[str, Any]], None] | None = None,
) -> Path:
    """The folder of a repository's snapshot, with config, tokenizer and safetensors weights; subfolders are left out.

    The small files come first; `check_config` and the reader's own checks may refuse the model before its weights are
    downloaded. Raises ModelUnavailableError, and what the checks raise.
    """
    folder = _snapshot(repository, _SMALL_FILES, revision=revision, offline=offline, progress=progress)
    config = folder / "config.json"
    if not config.is_file():
        raise _not_a_model(repository, revision=revision, offline=offline)
    parsed = parse_config(config.read_bytes())
    if check_config is not None:
        check_config(parsed)
    patterns = ["model.safetensors"]
    if (folder / "model.safetensors.index.json").is_file():
        patterns = sorted(set(weight_files(folder).values()))
    folder = _snapshot(repository, _SMALL_FILES + patterns, revision=revision, offline=offline, progress=progress)
    if not all((folder / name).exists() for name in patterns):
        raise _not_a_model(repository, revision=revision, offline=offline)
    return folder


def fetch_file(repository: str, file: str, *, revision: str | None, offline: bool, progress: bool) -> Path:
    """One file of a repository. Raises ModelUnavailableError."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            repository, file, revision=revision, local_files_only=offline, tqdm_class=None if progress else _silent()
        )

    return Path(_call(repository, revision, fetch))


def _snapshot(repository: str, patterns: Sequence[str], *, revision: str | None, offline: bool, progress: bool) -> Path:
    def fetch() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            local_files_only=offline,
            tqdm_class=None if progress else _silent(),
        )

    return Path(_call(repository, revision, fetch))


def _silent() -> Any:
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


def _call(repository: str, revision: str | None, fetch: Callable[[], T]) -> T:
    """Runs a call of the library and turns what it raises into one line."""
    from huggingface_hub import constants, errors

    named = f"Hugging Face repository {repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return fetch()
    except errors.GatedRepoError as error:
        message = f"{named} is gated: accept its terms at {constants.ENDPOINT}/{repository} and set HF_TOKEN"
        raise ModelUnavailableError(message, param="model") from error
    except errors.RepositoryNotFoundError as error:
        message = f"{named} does not exist, or is private: then set HF_TOKEN"
        raise ModelUnavailableError(message, param="model") from error
    except errors.RevisionNotFoundError as error:
        raise ModelUnavailableError(f"{named}: there is no such revision", param="revision") from error
    except errors.LocalEntryNotFoundError as error:
        how = "the hub is not asked (offline)" if constants.HF_HUB_OFFLINE else "the hub was not reached"
        message = f"{named} is not complete in the cache {constants.HF_HUB_CACHE}, and {how}"
        raise ModelUnavailableError(message, param="model") from error
    except errors.EntryNotFoundError as error:
        raise ModelUnavailableError(f"{named} has no such file", param="model") from error
    except Exception as error:  # errors of its HTTP library come through, and differ by version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailableError(f"{named} could not be fetched: {reason}", param="model") from error


def _not_a_model(repository: str, *, revision: str | None, offline: bool) -> ModelUnavailableError:
    """Why a repository cannot be served as it is; names the GGUF files it has instead."""
    from huggingface_hub import HfApi

    files = (
        [] if offline else _call(repository, revision, lambda: HfApi().list_repo_files(repository, revision=revision))
    )
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    start = f"Hugging Face repository {repository!r} has no config.json with safetensors weights"
    if gguf:
        return ModelUnavailableError(
            f"{start}, but GGUF files; name one of them, as in {repository}:{gguf[0]} (has {', '.join(gguf[:10])})",
            param="model",
        )
    if any(name.endswith((".bin", ".pth", ".pt")) for name in files):
        return ModelUnavailableError(
            f"{start}, only pickled ones, which are not read, since they can run code", param="model"
        )
    return ModelUnavailableError(start, param="model")
