"""Records that pages are made of are complete, and keep their bars."""

import pytest

from benchmarks import checkpointing_budget, precision
from benchmarks.bench_pages import RESULTS, grouped, results_of
from benchmarks.gpt2xl import from_disk
from benchmarks.host_memory import peaks, strategies
from benchmarks.host_memory.cases import cases as host_memory_cases
from benchmarks.planner import gpt2xl_plans, pairs
from benchmarks.runner import read
from benchmarks.techniques import RESULT as TECHNIQUES_RESULT
from benchmarks.techniques import page_of
from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment, load_sweep
from lightning_memfit.bench.record import Result, read_result
from lightning_memfit.bench.report import as_csv
from lightning_memfit.bench.table import markdown
from lightning_memfit.memory import MIB, Tier
from lightning_memfit.techniques.core.registry import TECHNIQUES


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


# --- several devices, the disk and the host ---


def test_gpt2_xl_trains_from_disk_within_12_gib() -> None:
    (result,) = read(from_disk.RESULT)["rows"]
    assert result["peak_rss_bytes"] < 12 * 2**30
    assert len(result["optimizer_steps"]) >= 2
    assert result["left_on_disk"] == []
    predicted = sum(result["predicted"]["bytes_per_rank"]["disk"].values())
    assert abs(result["peak_disk_bytes"] / predicted - 1) < 0.001
    later = result["optimizer_steps"][1:]
    assert min(step["update_share_of_raw"] for step in later) > 0.7


def test_strategies_keep_what_the_page_counts() -> None:
    """Weights, optimizer states and, where they stay between steps, gradients; the rest is buckets and buffers."""
    kept = read(strategies.RESULT)
    rows = {row["strategy"]: row for row in kept["rows"]}
    per_parameter = {name: row["live_bytes"] / kept["parameters"] for name, row in rows.items()}
    counted = {"ddp": 16.0, "fsdp2": 8.0, "zero_1": 8.0, "zero_2": 8.0, "zero_3": 7.0, "zero_offload": 10.0}
    for name, expected in counted.items():
        assert expected <= per_parameter[name] < expected + 1.5
    assert abs(rows["zero_infinity"]["disk_bytes"] / kept["parameters"] - 18) < 0.5


HOST_MEMORY = read(peaks.RESULT)["rows"]


def test_host_memory_of_every_case_was_measured() -> None:
    assert [row["name"] for row in HOST_MEMORY] == [case.name for case in host_memory_cases()]


@pytest.mark.parametrize("row", HOST_MEMORY, ids=lambda row: f"{row['kind']}-{row['size']}-{row['ranks']}")
def test_predictions_of_host_memory_keep_their_bar(row: dict) -> None:
    """A run that takes more than was asked for swaps, or is killed; one that takes much less was refused in vain."""
    assert abs(peaks.error(row)) <= 0.05
    kept = peaks.predict(row).kept
    pinned = kept.total(Tier.PINNED_HOST) if row["kind"].startswith("disk") else 0
    assert row["locked_bytes"] == pytest.approx(pinned, abs=2 * MIB)


# --- plans, precisions and techniques ---


def test_recorded_plans_keep_their_limits():
    for row in read(gpt2xl_plans.RESULT)["rows"]:
        plan = row["plan"]
        assert not plan["fits"] or plan["needed_bytes"] <= plan["usable_bytes"]
        devices = plan["setting"]["world_size"] if plan["fits"] else 1
        for limit, tiers in (("host_gib", ("host", "pinned_host")), ("disk_gib", ("disk",))):
            each = sum(sum(plan["breakdown"].get(tier, {}).values()) for tier in tiers)
            assert devices * each <= row[limit] << 30


def test_every_plan_fits_and_refusals_are_right():
    tried = [pair for model in read(pairs.RESULT)["rows"] for pair in model["pairs"]]
    assert sum("setting" in pair for pair in tried) >= 0.75 * len(tried)
    assert all(pair["fits"] if "setting" in pair else not pair["num_fitting"] for pair in tried)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"exact": True}, "1 of 1 plans keep the recipe's numbers; for 0 of the other 0"),
        ({"exact": False, "best_exact_s": None}, "0 of 1 plans keep the recipe's numbers; for 1 of the other 1"),
        ({"exact": False, "best_exact_s": 1.04}, "0 of 1 plans keep the recipe's numbers; for 0 of the other 1"),
        ({"exact": False, "best_exact_s": 1.06}, "0 of 1 plans keep the recipe's numbers; for 1 of the other 1"),
    ],
)
def test_whether_numbers_had_to_change_is_told_from_what_was_measured(recorded, told):
    assert pairs.exactness([{"seconds": 1.0, **recorded}]).startswith(told)


def test_lossy_techniques_learn_as_float32_does():
    document = read(precision.RESULT)
    assert (document["steps"], document["seeds"]) >= (200, 3)
    rows = [row for row in document["rows"] if row["technique"] not in ("float32", "bf16-true")]
    assert len(rows) >= 8
    assert all(abs(excess) <= 0.5 for row in rows for excess in row["percent_above_float32"])


def test_recorded_peaks_are_within_their_budgets():
    for case in read(checkpointing_budget.RESULT)["rows"]:
        assert len(case["rows"]) == 10
        assert all(row["observed_bytes"] <= row["budget_bytes"] for row in case["rows"])
        assert all(row["above_milp"] <= 0.02 for row in case["rows"])
        assert case["solved_s"] <= 1.0


def test_recorded_peaks_of_techniques_keep_their_bar():
    rows = read(TECHNIQUES_RESULT)["rows"]
    names = {row["name"].partition(",")[0] for row in rows}
    assert names <= {"plain", *(technique.name for technique in TECHNIQUES)}
    for row in rows:
        if "measured_bytes" in row:
            assert abs(row["predicted_bytes"] / row["measured_bytes"] - 1) <= 0.03, row["name"]


@pytest.mark.parametrize("path", sorted({page_of(one) for one in TECHNIQUES}), ids=lambda path: path.stem)
def test_pages_of_techniques_have_one_shape(path):
    page = path.read_text()
    parts = ["\n**When to use it.** ", "\n## Use\n", "\n## Cost\n", "\n## Conflicts\n"]
    places = [page.index(part) for part in parts]
    assert page.startswith("# ")
    assert places == sorted(places)


# --- the sweep --------------------------------------------------------------------------------------------------------


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
    guide = (RESULTS.parents[1] / "docs" / "guides" / "scale.md").read_text()
    for name in ("report.md", "speedup.png", "memory.png", "pareto.png"):
        assert f"../../benchmarks/results/scaling_cpu/{name})" in guide
