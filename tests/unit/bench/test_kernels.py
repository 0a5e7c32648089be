"""Kernel measurements in small sizes: every operation is there, and the arithmetic of rooflines is right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.build import available_isas
from octavo.bench.local.kernels import Options, run_kernels
from octavo.bench.local.synthesize import Shape, synthesize
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.quant import Format

SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=700, context=2048)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthesize(path, SMALL)
    return str(path)


@pytest.fixture(scope="module")
def result(tiny: str) -> dict[str, Any]:
    formats = (Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.BF16)
    return run_kernels(Options.quick(model=tiny, formats=formats, rows=(1, 100), threads=2))


def test_every_operation_is_measured(result: dict[str, Any]) -> None:
    lines = result["results"]
    for form in ("q4_0", "q4_1", "q8_0", "bf16"):
        for rows in (1, 100):
            found = [line["op"] for line in lines if line["format"] == form and line["rows"] == rows]
            linears = {
                part for op in found if op.startswith("linear ") for part in op.removeprefix("linear ").split("+")
            }
            assert linears >= {"q", "k", "v", "o", "gate", "up", "down"}, (form, rows)
    ops = {line["op"] for line in lines}
    assert ops >= {"linear head", "attention decode", "attention prefill", "step decode", "step prompt"}
    assert ops >= {"rms_norm", "add", "quantize", "to_bf16", "silu_mul", "rope", "sample greedy", "sample top-p"}
    assert not [line for line in lines if line["op"] == "linear head" and line["rows"] > 64]


def test_figures_follow_from_times_and_ceilings(result: dict[str, Any]) -> None:
    ceilings = {name: values["best"] for name, values in result["ceilings"].items()}
    memory = max(value for name, value in ceilings.items() if name.startswith("memory"))
    for line in result["results"]:
        assert 0 < line["best_s"] <= line["median_s"]
        if line["op"] == "row phases":
            assert "roofline_s" not in line  # nobody knows their bound
            continue
        assert line["gb_s"] == pytest.approx(line["bytes"] / line["median_s"] / 1e9)
        assert line["roofline_percent"] == pytest.approx(100 * line["roofline_s"] / line["median_s"])
        assert math.isfinite(line["roofline_percent"])
    (line,) = [
        line
        for line in result["results"]
        if (line["op"], line["format"], line["rows"]) == ("linear gate+up", "q4_1", 100)
    ]
    assert line["shape"] == "192 x 64"
    assert line["bytes"] == 192 * 64 // 32 * 20
    assert line["operations"] == 2 * 192 * 64 * 100
    peak = max(ceilings["int8_all_threads_gop_s"], ceilings["int8_one_thread_gop_s"])
    peak = peak or max(ceilings["f32_all_threads_gop_s"], ceilings["f32_one_thread_gop_s"])
    assert line["roofline_s"] == pytest.approx(max(line["bytes"] / memory, line["operations"] / peak) / 1e9)


def test_attention_counts_pairs_that_see_each_other(result: dict[str, Any]) -> None:
    (line,) = [line for line in result["results"] if line["op"] == "attention prefill"]
    assert (line["rows"], line["context"]) == (64, 64)
    assert line["operations"] == 4 * (64 * 65 // 2) * 4 * 32
    assert line["bytes"] == 64 * 2 * 2 * 32 * 2  # K and V, 2 heads of 32, 2 bytes


def test_a_step_is_the_sum_of_its_phases(result: dict[str, Any]) -> None:
    steps = [line for line in result["results"] if line["op"].startswith("step")]
    assert steps
    for line in steps:
        assert line["roofline_s"] == pytest.approx(sum(phase["roofline_s"] for phase in line["phases"].values()))
        assert sum(phase["median_s"] for phase in line["phases"].values()) > 0.3 * line["median_s"]
        assert line["phases"]["attention"]["count"] == 2  # layers


def test_result_is_plain_json(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again["kind"] == "kernels"
    assert again["options"]["formats"] == ["q4_0", "q4_1", "q8_0", "bf16"]
    assert again["ceilings"]["barrier_ns"]["best"] > 0
    assert {"load_before", "load_after", "commit", "machine", "isa", "threads"} <= again.keys()


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set_can_be_measured(tiny: str, isa: str) -> None:
    result = run_kernels(Options.quick(model=tiny, isa=isa, rows=(2,), rounds=1, threads=1))
    assert result["isa"] == isa
    assert all(line["median_s"] > 0 for line in result["results"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"isa": "avx9"}, "avx9"),
        ({"rows": ()}, "--rows"),
        ({"rows": (0,)}, "--rows"),
        ({"rounds": 0}, "--rounds"),
        ({"formats": (Format.F32,)}, "f32"),
        ({"buffer_bytes": 1 << 60}, "GiB"),
    ],
)
def test_refuses_what_cannot_be_measured(tiny: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_kernels(Options.quick(model=tiny, **change))


def test_native_loops_refuse_wrong_sizes() -> None:
    pool, buffer = _native.Pool(1), _native.ReadBuffer(4096, False)
    assert buffer.bytes == 4096
    assert buffer.time_read(pool, 1024, 2, 4) > 0
    for tile, repeats, streams in ((1000, 1, 1), (8192, 1, 1), (64, 1, 2), (64, 0, 1), (64, 1, 0)):
        with pytest.raises(ValueError, match=r"tile_bytes|streams"):
            buffer.time_read(pool, tile, repeats, streams)
    with pytest.raises(ValueError, match="named"):
        _native.bench_peak(pool, "int3", 10)
    with pytest.raises(ValueError, match="named"):
        _native.bench_row_op("portable", "nothing", 64, 32, 1)


def test_phases_of_a_step_need_a_table_line_per_row(tiny: str) -> None:
    with pytest.raises(ValueError, match="one line per row"):
        ids = np.zeros(2, np.int32)
        starts = np.array([0, 1, 2], np.int32)
        _native.bench_phases(_native.Program(_native.Weights()), _native.Pool(1), ids, ids, starts, ids[None], ids)


def test_command(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    path = tmp_path / "k.json"
    assert main(["bench", "kernels", "--quick", "--model", tiny, "--rows", "1,3", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "| linear gate+up" in out
    assert "barrier, ns" in out
    assert "WARNING" in err
    assert "3.25" in err
    assert json.loads(path.read_text())["load_before"] == 3.25
