"""Offline throughput on a tiny model: counts are right, ways of batching differ as they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.local.synthesize import Shape, synthesize
from octavo.bench.local.throughput import Options, run_throughput
from octavo.bench.workloads import Workload
from octavo.cli.main import main
from octavo.errors import ConfigError

WORK = {
    "few": Workload(name="few", description="", requests=5, concurrency=2, words=6, output=4),
    "shared": Workload(name="shared", description="", requests=4, concurrency=1, words=4, output=3, shared_words=30),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    shape = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=700, context=2048)
    synthesize(path, shape)
    return str(path)


@pytest.mark.parametrize(
    ("batch", "batching"), [(None, "continuous"), (1, "one at a time"), (2, "static batches of 2")]
)
def test_figures(tiny: str, batch: int | None, batching: str) -> None:
    options = Options(
        model=tiny, workloads=tuple(WORK), rounds=2, seed=5, batch=batch, engine={"kv_cache_memory": "16M"}
    )
    seen: list[tuple[int, int]] = []
    result = run_throughput(options, lambda _, done, total: seen.append((done, total)), WORK)
    assert seen[0] == (0, 4)
    assert seen[-1] == (4, 4)
    assert result["batching"] == batching
    assert json.loads(json.dumps(result, allow_nan=False))["kind"] == "throughput"
    few, shared = result["results"]
    for line, workload in ((few, WORK["few"]), (shared, WORK["shared"])):
        assert len(line["rounds"]) == 2
        for one in line["rounds"]:
            assert one["out_tok_s"] * one["wall_s"] == pytest.approx(workload.requests * workload.output)
            assert one["req_s"] * one["wall_s"] == pytest.approx(workload.requests)
            assert 0 < one["ttft_p50_ms"] <= one["ttft_p95_ms"] <= 1e3 * one["wall_s"]
            assert one["ttft_p50_ms"] <= one["e2e_p50_ms"]
            assert one["tpot_p50_ms"] > 0
        assert line["out_tok_s"] == pytest.approx(sum(one["out_tok_s"] for one in line["rounds"]) / 2)
    assert few["cached_tokens"] == 0  # the prefix cache is off
    assert shared["cached_tokens"] > 0
    assert few["rounds"][0]["prompt_tokens"] != few["rounds"][1]["prompt_tokens"]  # another seed


def test_refuses_unknown_workloads_and_options(tiny: str) -> None:
    with pytest.raises(ConfigError, match="no workload 'c32'"):
        run_throughput(Options(model=tiny, workloads=("c32",)))
    with pytest.raises(ConfigError, match="at least 1"):
        run_throughput(Options(model=tiny, workloads=("single",), batch=0))
    with pytest.raises(ConfigError, match="at least 1"):
        run_throughput(Options(model=tiny, workloads=("single",), rounds=0))


def test_command(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "prompt", "--rounds", "1", "--json", str(tmp_path / "r.json"), "--kv-cache-memory", "64M"]
    assert main(["bench", "throughput", "--model", tiny, *flags]) == 0
    out = capsys.readouterr().out
    assert "| prompt" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["options"]["engine"] == {"kv_cache_memory": "64M"}
    assert [line["workload"] for line in result["results"]] == ["prompt"]
