"""Whatever a user may name as a model becomes a checkpoint, or an error that says what was tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError, ModelFileError, ModelUnavailableError
from octavo.loaders.checkpoint import open_checkpoint
from support.model_files import gguf_metadata, write_hf_folder, write_tiny_gguf


def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny-v1.gguf")
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.name, checkpoint.kind, checkpoint.architecture) == ("tiny-v1", "gguf", "llama")
    assert checkpoint.path == path
    assert checkpoint.file_bytes == path.stat().st_size
    assert checkpoint.chat_template == "{{ messages }}"
    assert (checkpoint.tokenizer_json, checkpoint.tokenizer_config, checkpoint.generation_config) == (None, {}, {})
    assert checkpoint.metadata["llama.block_count"] == 2
    assert checkpoint.tensors["token_embd.weight"].shape == (50, 64)
    assert checkpoint.unsupported == {}


def test_a_hugging_face_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hf_folder(tmp_path / "my-model")
    monkeypatch.chdir(folder)
    for reference in (str(folder), "../my-model", "."):
        checkpoint = open_checkpoint(reference)
        assert (checkpoint.name, checkpoint.kind, checkpoint.architecture) == ("my-model", "hf", "LlamaForCausalLM")
    assert checkpoint.metadata["hidden_size"] == 64
    assert checkpoint.tokenizer_json == b'{"version": "1.0"}'
    assert checkpoint.generation_config["temperature"] == 0.6


def test_a_catalogue_name(smollm2: Path) -> None:
    checkpoint = open_checkpoint("smollm2-135m", offline=True)
    assert checkpoint.name == "smollm2-135m"
    assert checkpoint.path == smollm2


def test_an_existing_path_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("owner/name").name == "name"


@pytest.mark.parametrize("reference", ["no-such-model", "folder/none.gguf", "/none/at/all", "x" * 5000, "", "a\0b"])
def test_what_is_not_there(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnavailableError, match=r"no catalogue name .*, no file or folder .*, and no Hugging Face"):
        open_checkpoint(reference)


def test_near_names_are_told() -> None:
    with pytest.raises(ModelUnavailableError, match=r"did you mean 'smollm2-135m'\?"):
        open_checkpoint("smollm2")


def test_revision_is_not_ignored(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    for reference in (str(path), "smollm2-135m", "nothing"):
        with pytest.raises(ConfigError, match="revision 'v1' applies to Hugging Face repositories"):
            open_checkpoint(reference, revision="v1")


def test_weights_alone_are_no_model(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    with pytest.raises(ModelFileError, match="name its folder instead"):
        open_checkpoint(str(folder / "model.safetensors"))


def test_digest_tells_weights_apart(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    digest = open_checkpoint(str(path)).digest
    assert open_checkpoint(str(path)).digest == digest
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    retimed = open_checkpoint(str(path)).digest
    write_tiny_gguf(path, gguf_metadata() | {"llama.rope.freq_base": 5000.0})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len({digest, retimed, open_checkpoint(str(path)).digest}) == 3


def test_digest_of_a_folder_covers_config_and_every_shard(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=2)
    digests = {open_checkpoint(str(folder)).digest}
    for path in (*sorted(folder.glob("*.safetensors")), folder / "config.json"):
        if path.name == "config.json":
            path.write_text(path.read_text().replace("10000.0", "5000.0"))
        else:
            os.utime(path, ns=(1, 1))
        digests.add(open_checkpoint(str(folder)).digest)
    assert len(digests) == 4


@pytest.mark.parametrize(("key", "value"), [("general.architecture", ["llama"]), ("general.name", "nameless")])
def test_a_file_without_architecture(tmp_path: Path, key: str, value: object) -> None:
    metadata = {name: item for name, item in gguf_metadata().items() if name != "general.architecture"} | {key: value}
    checkpoint = open_checkpoint(str(write_tiny_gguf(tmp_path / "x.gguf", metadata)))
    with pytest.raises(ModelFileError, match=r"x\.gguf: general\.architecture does not name an architecture"):
        _ = checkpoint.architecture


def test_importing_is_light() -> None:
    """What is slow to import is imported when it is used: a start from a file needs none of it."""
    script = """
import sys, octavo.loaders.checkpoint
print([name for name in ("huggingface_hub", "httpx2", "tqdm", "subprocess", "tokenizers", "gguf") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == "[]"
