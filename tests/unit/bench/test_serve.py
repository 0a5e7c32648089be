"""The load bench against real servers: one without a model, and one with a tiny one beside its simulation."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench.http.client import Target, drive, first_model
from octavo.bench.http.server import command_line, serving
from octavo.bench.local.simulate import simulate
from octavo.bench.local.synthesize import Shape, synthesize
from octavo.bench.traffic import Job, Traffic
from octavo.cli.flags import resolve
from octavo.cli.main import main, parse
from octavo.config import CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig
from octavo.errors import ConfigError
from support.live import live

from .test_simulate import COSTS


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with live("mock", "--api-key", "anna:k-anna", "bert:k-bert") as server:
        yield server.url


def test_command(mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "r.json", tmp_path / "p.svg"
    arguments = [
        "bench",
        "serve",
        "--base-url",
        mock,
        "--api-key",
        "k-anna",
        "--backend",
        "openai-chat",
        "--num-prompts",
        "6",
    ]
    arguments += [
        "--random-input-len",
        "12",
        "--random-output-len",
        "5",
        "--request-rate",
        "100",
        "--max-concurrency",
        "3",
    ]
    assert main([*arguments, "--goodput", "e2el:60000", "--json", str(path), "--plot", str(plot), "--label", "x"]) == 0
    out = capsys.readouterr().out
    assert "Serving Benchmark Result" in out
    assert "Mean TTFT (ms):" in out
    result = json.loads(path.read_text())
    assert (result["kind"], result["completed"], result["failed"], result["label"]) == ("serve", 6, 0, "x")
    assert result["total_input_tokens"] > 6 * 12
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] <= 3
    assert result["engine"]["preemptions"] == 0
    assert plot.read_bytes().startswith(b"<?xml")


def test_wrong_key_and_no_server(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-prompts", "1", "--no-result", "--random-input-len", "3", "--random-output-len", "2"]
    assert main(["bench", "serve", "--base-url", mock, "--api-key", "wrong", "--model", "m", *few]) == 2
    assert "401" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["bench", "serve", "--base-url", url, *few]) == 2
    assert "no server answers" in capsys.readouterr().err


def test_tenants_have_keys_of_their_own_and_failures_are_outcomes(mock: str) -> None:
    jobs = tuple(Job(prompt=(("p", 3),), output_tokens=2, tenant=tenant) for tenant in ("anna", "bert", "nobody"))
    target = Target(base_url=mock, model="mock", keys={"anna": "k-anna", "bert": "k-bert"}, backend="openai-chat")
    anna, bert, nobody = asyncio.run(drive(Traffic(name="t", jobs=jobs), target))
    assert anna.error is None and bert.error is None
    assert nobody.error is not None and nobody.error.startswith("401")


@pytest.mark.parametrize(
    "flags",
    [
        ["--extra-body", "[1]"],
        ["--tenant-key", "a"],
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
        ["--dataset-name", "trace"],
        ["--dataset-path", "x"],
        ["--plot", "x.gif"],
        ["--max-concurrency", "0"],
        ["--num-warmups", "-1"],
    ],
)
def test_wrong_flags(flags: list[str]) -> None:
    assert main(["bench", "serve", "--no-result", *flags]) == 2


def test_command_lines_come_back() -> None:
    config = Config(
        model=ModelConfig(model="x", served_model_name=("a", "b")),
        cache=CacheConfig(enable_prefix_caching=False, kv_cache_memory="2G"),
        scheduler=SchedulerConfig(max_num_seqs=3),
        server=ServerConfig(port=1),
    )
    parsed = parse(["serve", *command_line(config)])
    assert parsed is not None
    again = resolve(parsed, {})
    assert (again.model, again.cache, again.scheduler) == (config.model, config.cache, config.scheduler)
    assert again.server == ServerConfig()


def test_a_server_that_does_not_start_tells_why() -> None:
    with pytest.raises(ConfigError, match="no-such-model"), serving(["--model", "no-such-model.gguf"]):
        pass


def test_no_server_is_left_behind() -> None:
    with pytest.raises(SystemExit), serving(["--model", "smollm2-135m", "--kv-cache-memory", "256M"]) as url:
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="no server answers"):
        asyncio.run(first_model(url))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_simulation_and_server_agree_on_what_does_not_depend_on_time(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    shape = Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=49152, context=4096)
    synthesize(path, shape, like="smollm2-135m")
    parts = [(("a", 100),), (("a", 200), ("b", 50)), (("a", 40), ("c", 30)), (("a", 200), ("b", 90)), (("d", 5),)]
    jobs = tuple(Job(prompt=part, output_tokens=20) for part in parts)
    traffic = Traffic(name="t", jobs=jobs, max_concurrency=1)
    virtual = simulate(traffic, COSTS, Config())
    with serving(["--model", str(path), "--served-model-name", "m"]) as url:
        real = asyncio.run(drive(traffic, Target(base_url=url, model="m")))
    for expected, outcome in zip(virtual.outcomes, real, strict=True):
        assert outcome.error is None
        assert outcome.prompt_tokens == expected.prompt_tokens
        assert outcome.output_tokens == expected.output_tokens == 20
        assert outcome.cached_tokens == expected.cached_tokens
    assert [outcome.cached_tokens for outcome in real] == [0, 96, 32, 240, 0]
