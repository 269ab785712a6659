"""The committed sweep is complete, and its CSV and page say what its records say."""

import pytest

from benchmarks.text import RESULTS, ROOT
from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.record import Result, read_result
from lightning_memfit.bench.scaling import as_csv
from lightning_memfit.bench.sweep import load_sweep
from lightning_memfit.bench.table import markdown

SWEEP = RESULTS / "scaling_cpu"


@pytest.fixture(scope="module")
def results() -> list[Result]:
    sweep = load_sweep(FOLDER / "sweeps" / "scaling.yaml", "cpu", read_recipe)
    return [read_result(SWEEP / f"{row.name}.json") for row in sweep.rows]


def test_at_least_twelve_points_of_one_and_two_processes(results: list[Result]) -> None:
    assert len(results) >= 12
    assert {result.point["devices"] for result in results} == {1, 2}
    for result in results:
        assert result.status == "ok"
        assert result.prediction_error == pytest.approx(0, abs=0.03)


def test_csv_page_and_pictures_belong_to_the_records(results: list[Result]) -> None:
    sweep = "benchmarks/experiments/sweeps/scaling.yaml"
    again = f"run `memfit scale --config {sweep} --folder benchmarks/results --report-only`"
    assert (SWEEP / "points.csv").read_text() == as_csv(results), again
    page = (SWEEP / "report.md").read_text()
    assert markdown(results) in page, again
    assert "--folder benchmarks/results --report-only" in page, "the command must repeat the page"
    for name in ("speedup", "memory", "pareto"):
        assert (SWEEP / f"{name}.png").stat().st_size > 10_000
    guide = (ROOT / "docs" / "guides" / "scale.md").read_text()
    for name in ("report.md", "speedup.png", "memory.png", "pareto.png"):
        assert f"../../benchmarks/results/scaling_cpu/{name})" in guide
