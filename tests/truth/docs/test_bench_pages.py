"""Records are those of the experiments, and their predictions hold."""

import pytest

from benchmarks.bench_pages import RESULTS, grouped, results_of
from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment


@pytest.mark.parametrize("name", ["activation_budget", "bert_large", "gpt2xl"])
def test_every_row_has_a_record_and_a_right_prediction(name: str) -> None:
    experiment = load_experiment(FOLDER / f"{name}.yaml", "small", "cpu", read_recipe)
    results = results_of(experiment)
    assert [result.row for result in results] == [row.name for row in experiment.rows]
    assert {path.stem for path in (RESULTS / experiment.folder_name).glob("*.json")} == {r.row for r in results}
    for result in results:
        assert result.status == "ok"
        assert result.prediction_error == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("name", ["zero_stages", "gpt2xl_24gb", "blenderbot"])
def test_every_strategy_trained_the_same(name: str) -> None:
    """What is divided among devices or put on the host changes rounding alone. Whole models keep their predictions."""
    experiment = load_experiment(FOLDER / f"{name}.yaml", "small", "cpu", read_recipe)
    results = results_of(experiment)
    assert [result.row for result in results] == [row.name for row in experiment.rows]
    by_batch: dict[str, list[float]] = {}
    for result in results:
        assert result.status == "ok"
        assert (result.predicted is None) == ("divides the model" in result.no_prediction)
        assert result.prediction_error is None or result.prediction_error == pytest.approx(0, abs=0.03)
        assert result.loss_first is not None
        by_batch.setdefault(str(result.settings["data"]), []).append(result.loss_first)
    for losses in by_batch.values():
        assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)


def test_every_tool_trained_the_same() -> None:
    """Rows of a group start from one loss; they end at one, as far as their numerics allow."""
    experiment = load_experiment(FOLDER / "peers.yaml", "small", "cpu", read_recipe)
    results = results_of(experiment)
    assert [result.row for result in results] == [row.name for row in experiment.rows]
    assert {result.row for result in results if result.status != "ok"} == {"host_states_torchao"}  # needs CUDA
    groups = grouped(results)
    assert len(groups) == 6
    for group, row in groups.items():
        ours = row[""]
        assert ours.prediction_error == pytest.approx(0, abs=0.03)
        exact, few_bits = group == "fp32", group.startswith("least")  # torchao's states have 4 bits there
        for peer in (result for result in row.values() if result.status == "ok"):
            assert peer.measured is not None
            assert peer.measured.rss_growth_bytes
            assert peer.loss_first == pytest.approx(ours.loss_first, rel=1e-6 if exact else 1e-3)
            assert peer.loss_last == pytest.approx(ours.loss_last, rel=1e-5 if exact else 5e-2 if few_bits else 1e-2)
