"""Reports from result files, with matplotlib and without it, and where result files go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import results
from octavo.bench.report import write_report
from octavo.bench.tables import duration, table
from octavo.cli.main import main
from octavo.errors import ConfigError


def _kernels() -> dict[str, Any]:
    def line(op: str, rows: int, context: int | None = None) -> dict[str, Any]:
        return {
            "op": op, "shape": "3072 x 576", "format": "q4_1", "rows": rows, "context": context, "best_s": 1e-5,
            "median_s": 2e-5, "bytes": 1e6, "operations": 3.5e6 * rows, "gb_s": 50.0, "gop_s": 175.0 * rows,
            "bound": "memory", "roofline_s": 1e-5, "roofline_percent": 50.0, "best_roofline_percent": 100.0,
        }  # fmt: skip

    ceilings = {name: {"best": 2.0, "median": 1.5} for name in ("memory_huge_pages_one_thread_gb_s", "barrier_ns")}
    lines = [line("linear gate+up", 1), line("linear gate+up", 8), line("attention decode", 1, 256)]
    phases = {"rows": {"count": 90, "median_s": 1e-3, "roofline_s": 0.0}}
    phases["attention"] = {"count": 30, "median_s": 3e-3, "roofline_s": 1.5e-3}
    lines.append(line("step decode", 16, 256) | {"phases": phases})
    bare = line("row phases", 8)
    lines.append({key: bare[key] for key in ("op", "shape", "format", "rows", "context", "best_s", "median_s")})
    return _header("kernels") | {"isa": "avx2", "threads": 2, "ceilings": ceilings, "results": lines}


def _throughput(commit: str = "abc1234") -> dict[str, Any]:
    line = {"workload": "c16", "out_tok_s": 512.0, "req_s": 8.0, "ttft_p50_ms": 90.0, "ttft_p95_ms": 120.0}
    return _header("throughput", commit) | {"batching": "continuous", "results": [line]}


def _race() -> dict[str, Any]:
    def figures(speed: float, ttft: float) -> dict[str, float]:
        return {"out_tok_s": speed, "ttft_p50": ttft}

    medians = {
        "c16": {
            "octavo": figures(400, 500),
            "other": figures(160, 900),
            "offline-octavo": {"out_tok_s": 440.0},
            "offline-other": {"out_tok_s": 220.0},
        },
        "prompt": {"octavo": figures(7, 250), "other": figures(3, 600)},
    }
    return _header("race") | {"results": medians}


def _server() -> dict[str, Any]:
    return _header("server") | {"results": {"busy": {"single": {"alone_tok_s": 250.0, "share": 0.75}}}}


def _header(kind: str, commit: str = "abc1234") -> dict[str, Any]:
    machine = {"name": "test-2cpu", "cpu": "Test CPU", "cpus": 2}
    return {
        "kind": kind, "date": "2026-12-01 10:00 UTC", "commit": commit, "machine": machine, "model": "m",
        "load_before": 0.1, "load_after": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("image", ["svg", "png"])
def test_report(tmp_path: Path, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    results.write(_kernels(), folder=folder)
    results.write(_throughput(), folder=folder)
    results.write(_throughput("def5678"), folder=folder)
    results.write(_race(), folder=folder)
    results.write(_server(), folder=folder)
    (folder / "2026-12-01-soak.json").write_text(json.dumps({"what": "soak"}))
    arguments = ["bench", "report", "--results", str(folder), "--out", str(tmp_path), "--image", image]
    assert main(arguments) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert "| c16" in page
    assert "| linear gate+up" in page
    assert "| 25 % |" in page
    assert "75 % (50) |" in page
    assert "memory huge pages one thread, GB/s" in page
    assert [line.split() for line in page.splitlines() if "other" in line] == [
        ["|", "c16", "|", "other", "|", "160.0", "|", "900", "|", "2.50", "|"],
        ["|", "c16", "|", "offline-other", "|", "220.0", "|", "|", "2.00", "|"],
        ["|", "prompt", "|", "other", "|", "3.0", "|", "600", "|", "2.40", "|"],
    ]
    assert "share 0.75" in page
    plots = sorted((tmp_path / "plots").iterdir())
    assert [plot.suffix for plot in plots] == [f".{image}"] * 3
    for plot in plots:
        assert f"plots/{plot.name}" in page
        assert plot.read_bytes().startswith(b"<?xml" if image == "svg" else b"\x89PNG")
    drawn = [plot.read_bytes() for plot in plots]
    assert main(arguments) == 0
    assert [plot.read_bytes() for plot in plots] == drawn  # a report is made again without a difference


def test_noise_is_told(tmp_path: Path) -> None:
    results.write(_throughput() | {"load_before": 2.0}, folder=tmp_path)
    page = write_report(tmp_path, tmp_path).read_text()
    assert "not quiet" in page


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    results.write(_kernels(), folder=tmp_path)
    assert main(["bench", "report", "--results", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "pip install 'octavo[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


def test_refuses_a_folder_without_results_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results"):
        write_report(tmp_path, tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match=r"x\.json cannot be read"):
        write_report(tmp_path, tmp_path)


def test_result_files_are_named_and_kept(tmp_path: Path) -> None:
    first = results.write(_kernels(), folder=tmp_path)
    second = results.write(_kernels(), folder=tmp_path)
    assert first.name == "2026-12-01-test-2cpu-abc1234-kernels.json"
    assert second.name == "2026-12-01-test-2cpu-abc1234-2-kernels.json"
    assert json.loads(second.read_text()) == _kernels()
    with pytest.raises(ConfigError, match="--json"):
        results.write(_kernels(), tmp_path / "nowhere" / "x.json")


def test_header_tells_machine_and_commit() -> None:
    header = results.header("kernels", {"rows": 1})
    assert header["machine"]["name"] == results.machine_name()
    assert header["machine"]["cpus"] >= 1
    assert header["options"] == {"rows": 1}
    root = Path(results.__file__).parents[3]
    if (root / ".git").exists():
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        assert header["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_tables_line_up() -> None:
    lines = table(("name", "n"), [("a", 1), ("longer", 1000)], text_columns=1)
    assert lines == ["| name   |    n |", "| ------ | ---: |", "| a      |    1 |", "| longer | 1000 |"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 us"), (3.4e-8, "34 ns")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    out = capsys.readouterr().out
    for verb in ("kernels", "throughput", "synthesize", "report"):
        assert verb in out
