"""The cost model: fits find the terms that made the points, and the whole command runs on a tiny model and a real server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from octavo.bench.local.costs import Point, StepCosts, errors, fit, fit_serving, measure_scheduler, read_costs
from octavo.bench.local.synthesize import Shape, synthesize
from octavo.cli.main import main
from octavo.errors import ConfigError

TRUE = StepCosts(
    token_knots=(1, 4, 16, 64, 256, 512),
    tokens=(5e-3, 6e-3, 1e-2, 4e-2, 0.15, 0.3),
    sampled=2e-4,
    decode_pairs=3e-7,
    prefill_pairs=2e-7,
)


def _points(noise: float = 0.0) -> list[Point]:
    shapes: list[tuple[tuple[int, int, bool], ...]] = []
    for context in (50, 500, 3000):
        shapes += [tuple((context, 1, True) for _ in range(rows)) for rows in (1, 2, 4, 8, 16, 32, 64)]
        shapes += [((context, count, count % 3 == 0),) for count in (8, 16, 32, 64, 128, 256, 512)]
        shapes += [(*((context, 1, True),) * rows, (0, 256 - rows, True)) for rows in (1, 16, 63)]
    signs = itertools.cycle((1, -1))
    exact = [Point(rows=shape, seconds=TRUE.step_s(Point(rows=shape, seconds=0.0).plan())) for shape in shapes]
    return [Point(rows=p.rows, seconds=p.seconds * (1 + noise * next(signs))) for p in exact]


def test_fit_finds_the_terms() -> None:
    points = _points()
    found = fit(points)
    assert found.sampled == pytest.approx(TRUE.sampled, rel=0.2)
    assert found.decode_pairs == pytest.approx(TRUE.decode_pairs, rel=0.02)
    assert found.prefill_pairs == pytest.approx(TRUE.prefill_pairs, rel=0.02)
    wrong = errors(found, points)
    assert wrong["all"]["points"] == len(points)
    assert wrong["all"]["p90_percent"] < 1
    assert {"decode", "prompt", "mixed", "all"} == set(wrong)
    assert errors(fit(_points(noise=0.05)), points)["all"]["median_percent"] < 5


def test_terms_are_never_negative() -> None:
    points = [Point(rows=((0, count, True),), seconds=1.0 / count) for count in (1, 2, 4, 8)]
    found = fit(points)
    assert min(*found.tokens, found.sampled, found.decode_pairs, found.prefill_pairs) >= 0
    with pytest.raises(ConfigError, match="nothing to fit"):
        fit([])


def test_serving_fit() -> None:
    found = fit_serving([(count, 1e-3 + 2e-4 * count) for count in (1, 8, 64)])
    assert found.step == pytest.approx(1e-3, rel=1e-3)
    assert found.token == pytest.approx(2e-4, rel=1e-3)
    assert fit_serving([(1, -1e-3), (8, -2e-3)]).token == 0


def test_the_scheduler_is_timed() -> None:
    found = measure_scheduler()
    assert 0 < found.step + 64 * found.row < 0.05


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthesize(path, Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=700, context=1024))
    return str(path)


def test_command(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    small = ["--max-num-seqs", "8", "--kv-cache-memory", "8M"]
    assert main(["bench", "costs", "--model", tiny, *small, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "server and client, each token" in out
    assert "| all " in out
    result = json.loads(path.read_text())
    assert [point["concurrency"] for point in result["serving"]] == [1, 4]
    assert len(result["points"]) == result["fit"]["all"]["points"] > 20
    _, costs = read_costs(path, "ignored")
    assert costs.model.max_context == 1024
    assert costs.step.token_knots[-1] == 512
    assert main(["bench", "simulate", "--costs", str(path), "--dataset-name", "single", "--no-result"]) == 0
    assert "Output token throughput" in capsys.readouterr().out


def test_refuses_a_model_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    synthesize(path, Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=700, context=256))
    assert main(["bench", "costs", "--model", str(path), "--backend-only", "--no-result"]) == 2
