"""Flags and environment variables derive from the configuration; vLLM's commands run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.flags import Parser, resolve
from octavo.config import Config
from octavo.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*arguments: str, **environment: str) -> Config:
    parser = Parser()
    serve.add_parser(parser.add_subparsers(parser_class=Parser))
    return resolve(serve.with_model(parser.parse_args(["serve", *arguments])), environment)


def test_defaults() -> None:
    assert config() == Config()


def test_a_vllm_command_runs_as_it_stands() -> None:
    words = (
        "M --dtype bfloat16 --max-model-len 8192 --gpu-memory-utilization 0.90 --max-num-seqs 64 --served-model-name x "
        "--enable-prefix-caching --enable-chunked-prefill --no-enable-chunked-prefill --api-key k --host h --port 99 "
        "--uvicorn-log-level warning --disable-log-requests"
    )
    found = config(*words.split())
    assert found.model.model == "M"
    assert found.model.served_model_name == ("x",)
    assert found.model.max_model_len == 8192
    assert found.cache.gpu_memory_utilization == 0.9
    assert found.scheduler.enable_chunked_prefill is False
    assert found.server.api_key == ("k",)
    assert (found.server.host, found.server.port) == ("h", 99)


def test_model_flag_and_position() -> None:
    assert config("--model", "M").model.model == "M"
    with pytest.raises(ConfigError, match="two models"):
        config("A", "--model", "B")


def test_keys_repeat() -> None:
    assert config("--api-key", "a", "b", "--api-key", "n:c").server.api_key == ("a", "b", "n:c")


def test_environment_and_dot_env(empty_folder: Path) -> None:
    (empty_folder / ".env").write_text(
        "# comment\nexport OCTAVO_PORT='81'\nOCTAVO_BLOCK_SIZE=32\nOTHER=1\nVLLM_HOST=dot\n"
    )
    found = config(OCTAVO_PORT="82", OCTAVO_ENABLE_PREFIX_CACHING="false", OCTAVO_API_KEY="a,n:b", VLLM_API_KEY="old")
    assert found.server.port == 82
    assert found.cache.block_size == 32
    assert found.cache.enable_prefix_caching is False
    assert found.server.api_key == ("a", "n:b")
    assert found.server.host == "dot"
    assert config("--port", "83", OCTAVO_PORT="82").server.port == 83
    assert config(VLLM_API_KEY="old").server.api_key == ("old",)
    for nothing in ("", " ", ",", " , "):  # not an open server: whoever sets the variable wants a key
        with pytest.raises(ConfigError, match="OCTAVO_API_KEY is empty"):
            config(OCTAVO_API_KEY=nothing)


@pytest.mark.parametrize(
    ("line", "value"),
    [("a # b", "a"), ("'a # b' # c", "a # b"), ('"a"', "a"), ("a#b", "a#b"), ("  a b ", "a b"), ("'a", "'a")],
)
def test_values_of_dot_env(empty_folder: Path, line: str, value: str) -> None:
    (empty_folder / ".env").write_text(f"OCTAVO_MODEL={line}\n")
    assert config().model.model == value


@pytest.mark.parametrize("service", ["VLLM", "OCTAVO"])
def test_kubernetes_port_is_ignored(service: str, caplog: pytest.LogCaptureFixture) -> None:
    injected = {f"{service}_PORT": "tcp://10.0.0.1:8000", f"{service}_SERVICE_HOST": "10.0.0.1"}
    assert config(**injected) == Config()
    assert "Kubernetes" in caplog.text
    assert len(caplog.records) == 1
    assert config(**{f"{service}_PORT": "8123"}).server.port == 8123


def test_misspelt_variables_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    config(OCTAVO_HOME="x", OCTAVO_ISA="avx2", OCTAVO_BUILD="7")
    assert not caplog.records
    config(OCTAVO_MAX_MODL_LEN="7")
    assert "OCTAVO_MAX_MODEL_LEN" in caplog.text


def test_underscores_are_dashes() -> None:
    assert (
        config("--max_model_len=7", "--served_model_name", "a_b").model
        == config("--max-model-len", "7", "--served-model-name", "a_b").model
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("OCTAVO_PORT", "many"), ("OCTAVO_BLOCK_SIZE", "7"), ("OCTAVO_ENABLE_PREFIX_CACHING", "perhaps")],
)
def test_bad_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        config(**{name: value})


def test_secrets_do_not_appear_in_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--api-key", "hush", "--no-such-flag")
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--tensor-parallel-size", "vLLM"),
        ("--enable-lora", "vLLM"),
        ("--max-num-seq", "--max-num-seqs"),
        ("--block-sise", "--block-size"),
    ],
)
def test_unknown_flags_are_refused_by_name(flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        config(flag, "1")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert flag in error
    assert message in error


@pytest.mark.parametrize(
    "arguments",
    [["--block-size", "12"], ["--dtype", "int4"], ["--port", "http"], ["--port"], ["--kv-cache-dtype", "fp8_e5m2"]],
)
def test_bad_values_are_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        config(*arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert arguments[0] in error


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--max-body-bytes", "0"),
        ("--max-header-bytes", "-1"),
        ("--timeout-keep-alive", "-1"),
        ("--shutdown-timeout", "nan"),
        ("--shutdown-timeout", "-0.5"),
        ("--max-num-queued-reqs", "0"),
        ("--served-model-name", ""),
    ],
)
def test_bounds(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        config(flag, value)
    variable = "OCTAVO_" + flag[2:].upper().replace("-", "_")
    if value:
        with pytest.raises(ConfigError, match=variable):
            config(**{variable: value})


def test_help_tells_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        config("--help")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 8000)" in text
    assert "OCTAVO_MAX_NUM_SEQS" in text
