"""Pages of experiments say what their records say, and the records are those of the experiments."""

from pathlib import Path

import pytest

from benchmarks.bench_pages import PAGES, RESULTS, page, results_of
from cli.experiments import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment

FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_page_is_what_its_records_give(file: Path) -> None:
    assert (PAGES / f"{file.stem}.md").read_text() == page(file), "run `python -m benchmarks.bench_pages`"


@pytest.mark.parametrize("name", ["activation_budget", "bert_large", "gpt2xl"])
def test_every_row_has_a_record_and_a_right_prediction(name: str) -> None:
    experiment = load_experiment(FOLDER / f"{name}.yaml", "small", "cpu", read_recipe)
    results = results_of(experiment)
    assert [result.row for result in results] == [row.name for row in experiment.rows]
    assert {path.stem for path in (RESULTS / experiment.folder_name).glob("*.json")} == {r.row for r in results}
    for result in results:
        assert result.status == "ok"
        assert result.prediction_error == pytest.approx(0, abs=0.03)
