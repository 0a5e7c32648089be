"""Repositories of the Hugging Face hub, fetched by the real library from a local stand-in.

The library reads its environment when imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.loaders.hub import HubReference, parse_reference
from support.hub_stub import COMMIT, HubStub, running
from support.model_files import hf_config, write_hf_folder, write_tiny_gguf

SCRIPT = """
import json, sys
from octavo.errors import OctavoError
from octavo.loaders.checkpoint import open_checkpoint
def refuse(config):
    from octavo.errors import UnsupportedModelError
    raise UnsupportedModelError(f"architecture {config['architectures'][0]}")
for case in json.loads(sys.argv[1]):
    if case.pop("refuse", False):
        case["check_config"] = refuse
    try:
        checkpoint = open_checkpoint(progress=False, **case)
        answer = {"name": checkpoint.name, "kind": checkpoint.kind, "path": str(checkpoint.path),
                  "tensors": len(checkpoint.tensors), "template": checkpoint.chat_template}
    except OctavoError as error:
        answer = {"error": type(error).__name__, "message": error.message}
    print(json.dumps(answer))
"""


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("repositories")
    one = folder_files(write_hf_folder(folder / "one"))
    gptq = folder_files(write_hf_folder(folder / "q", hf_config() | {"quantization_config": {"quant_method": "gptq"}}))
    return {
        "someone/tiny": {
            **one,
            "README.md": b"hello",
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": b"again",
            "original/params.json": b"{}",
        },
        "someone/sharded": folder_files(write_hf_folder(folder / "many", shards=3)),
        "someone/gptq": gptq,
        "someone/only-gguf": {"tiny.gguf": write_tiny_gguf(folder / "tiny.gguf").read_bytes(), "README.md": b"hello"},
        "someone/only-pickle": {"config.json": one["config.json"], "pytorch_model.bin": b"pickle"},
        "someone/gated": one,
    }


@pytest.fixture
def hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[HubStub]:
    with running(HubStub(repositories, gated=frozenset({"someone/gated"}))) as stub:
        yield stub


def opened(cases: list[dict[str, Any]], cache: Path, endpoint: str, **environment: str) -> list[dict[str, Any]]:
    """Runs `open_checkpoint` with each case's arguments in a new process."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HOME": str(cache),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **environment,
        },
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_first_use_downloads_and_later_ones_do_not(hub: HubStub, tmp_path: Path) -> None:
    [first] = opened([{"reference": "someone/tiny"}], tmp_path, hub.endpoint)
    assert (first["name"], first["kind"], first["template"]) == ("someone/tiny", "hf", "{{ messages }}")
    assert Path(first["path"]).is_relative_to(tmp_path)
    assert hub.downloads() == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert opened([{"reference": "someone/tiny"}], tmp_path, hub.endpoint) == [first]
    assert hub.downloads() == []

    offline_by_argument, none = opened(
        [{"reference": "someone/tiny", "offline": True}, {"reference": "someone/sharded", "offline": True}],
        tmp_path,
        hub.endpoint,
    )
    assert offline_by_argument == first
    assert none["error"] == "ModelUnavailableError"
    assert opened([{"reference": "someone/tiny"}], tmp_path, hub.endpoint, HF_HUB_OFFLINE="1") == [first]
    assert hub.requests == []

    # A hub that does not answer: what is in the cache is served, anything else is not.
    dead = "http://127.0.0.1:9"
    cached, absent = opened([{"reference": "someone/tiny"}, {"reference": "someone/sharded"}], tmp_path, dead)
    assert cached == first
    assert absent["error"] == "ModelUnavailableError"
    assert "'someone/sharded' is not complete in the cache" in absent["message"]
    assert "\n" not in absent["message"]


def test_shards_revisions_and_single_files(hub: HubStub, tmp_path: Path) -> None:
    sharded, revised, gguf, gguf_slash = opened(
        [
            {"reference": "someone/sharded"},
            {"reference": "someone/tiny", "revision": "v1"},
            {"reference": "someone/only-gguf:tiny.gguf"},
            {"reference": "someone/only-gguf/tiny.gguf"},
        ],
        tmp_path,
        hub.endpoint,
    )
    assert sharded["tensors"] == revised["tensors"] == 20
    assert revised["path"].endswith(COMMIT)
    assert (gguf["kind"], gguf["name"]) == ("gguf", "someone/only-gguf")
    assert gguf_slash == gguf
    assert [name for name in hub.downloads() if name.startswith("model-")] == [
        f"model-{shard:05}-of-00003.safetensors" for shard in (1, 2, 3)
    ]


def test_what_cannot_be_had_is_refused_by_name(hub: HubStub, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"reference": "no/such"}, "ModelUnavailableError", "'no/such' does not exist, or is private"),
        ({"reference": "someone/gated"}, "ModelUnavailableError", "'someone/gated' is gated: accept its terms at"),
        (
            {"reference": "someone/tiny", "revision": "v9"},
            "ModelUnavailableError",
            "at revision 'v9': there is no such",
        ),
        (
            {"reference": "someone/only-gguf"},
            "ModelUnavailableError",
            "name one of them, as in someone/only-gguf:tiny.gguf",
        ),
        ({"reference": "someone/only-gguf:x.gguf"}, "ModelUnavailableError", "has no such file"),
        ({"reference": "someone/only-pickle"}, "ModelUnavailableError", "only pickled ones, which are not read"),
        ({"reference": "someone/gptq"}, "UnsupportedModelError", "quantized checkpoints"),
        ({"reference": "someone/tiny", "refuse": True}, "UnsupportedModelError", "architecture LlamaForCausalLM"),
    ]
    answers = opened([dict(case) for case, _, _ in cases], tmp_path, hub.endpoint)
    for answer, (case, error, message) in zip(answers, cases, strict=True):
        assert answer.get("error") == error, case
        assert message in answer["message"]
        assert "\n" not in answer["message"]
    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.downloads())


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("owner/name", HubReference("owner/name", None)),
        ("owner/name-1.5:sub/x.Q4_0.gguf", HubReference("owner/name-1.5", "sub/x.Q4_0.gguf")),
        ("owner/name/x.gguf", HubReference("owner/name", "x.gguf")),
        ("name", None),
        ("folder/x.gguf", None),
        ("./owner/name", None),
        ("/owner/name", None),
        ("../name", None),
        ("a/b/c", None),
        ("owner/name:x.bin", None),
        ("owner/na me", None),
    ],
)
def test_references(reference: str, expected: HubReference | None) -> None:
    assert parse_reference(reference) == expected
