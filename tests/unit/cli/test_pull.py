"""`octavo pull`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from octavo.cli import pull
from octavo.errors import ConfigError, ModelUnavailableError
from support.model_files import write_hf_folder


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pull.add_parser(parser.add_subparsers())
    return parser.parse_args(["pull", *words])


def run(*words: str) -> int:
    arguments = parsed(*words)
    status: int = arguments.run(arguments)
    return status


def test_prints_where_the_model_is(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2-135m") == 0
    assert run("smollm2-135m", "--verify") == 0
    assert capsys.readouterr().out == f"{smollm2}\n" * 2


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["smollm2-135m", "94", "MiB", "Apache-2.0"]


def test_a_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hf_folder(tmp_path / "m")
    asked = []

    def fetch(repository: str, **options: object) -> Path:
        asked.append((repository, options["revision"]))
        return folder

    monkeypatch.setattr("octavo.loaders.hub.fetch_repository", fetch)
    assert run("owner/name", "--revision", "v1") == 0
    assert asked == [("owner/name", "v1")]
    assert capsys.readouterr().out == f"{folder}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a NAME or --list"),
        (["smollm2-135m", "--list"], "either a NAME or --list"),
        (["smollm2-135m", "--revision", "x"], "--revision applies to Hugging Face repositories"),
        (["owner/name", "--verify"], "--verify applies to catalogue models"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_unknown_name() -> None:
    with pytest.raises(ModelUnavailableError, match="no model 'nothing' in the catalogue"):
        run("nothing")
