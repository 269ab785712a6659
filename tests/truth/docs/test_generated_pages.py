"""Pages made from results say what the results say."""

import json
from pathlib import Path

import pytest

from lightning_memfit.memory import MemoryBreakdown, format_bytes

ROOT = Path(__file__).parents[3]


def test_pages_are_what_their_results_give() -> None:
    from benchmarks.pages import pages

    stale = [str(path.relative_to(ROOT)) for path, text in pages().items() if path.read_text() != text]
    assert not stale, "run `python -m benchmarks.pages`"


def test_every_comparison_keeps_the_bar() -> None:
    from benchmarks.estimator.collected import collect

    found = collect()
    sources = {Path(comparison.source).name for comparison in found}
    assert sources >= {"estimator_cpu.json", "bert_large_cpu_small", "gpt2xl_cpu_small", "scaling_cpu"}
    assert sources >= {"techniques_cpu.json", "checkpointing_budget.json"}
    for comparison in found:
        assert comparison.error == pytest.approx(0, abs=0.03), comparison


def test_estimates_on_the_cpu_keep_their_bar() -> None:
    from benchmarks.estimator.table import summary

    document = json.loads((ROOT / "benchmarks/results/estimator_cpu.json").read_text())
    assert not [row["name"] for row in document["rows"] if "failed" in row]
    figures = summary([row["error_allocated"] for row in document["rows"]])
    assert figures["runs"] >= 30
    assert figures["median"] <= 0.01
    assert figures["max"] <= 0.03
    assert figures["under"] <= 0.01


def test_estimates_for_cuda_keep_their_bar() -> None:
    from benchmarks.estimator.table import summary

    document = json.loads((ROOT / "benchmarks/results/estimator_cuda.json").read_text())
    assert not [row["name"] for row in document["rows"] if "failed" in row]
    allocated, reserved = (summary([row[f"error_{name}"] for row in document["rows"]]) for name in _FIGURES)
    assert allocated["runs"] >= 49
    assert allocated["max"] <= 0.005
    assert reserved["median"] <= 0.001
    assert reserved["under"] <= 0.03


_FIGURES = ("allocated", "reserved")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.name)
def test_every_result_names_its_command_and_versions(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document.get("command")
    assert "torch" in document.get("versions", {})


def test_every_case_of_the_zoo_has_a_verdict() -> None:
    from benchmarks.micro_batching.table import EXACTNESS_RESULT
    from tests.zoo import CASES

    rows = json.loads(EXACTNESS_RESULT.read_text())["rows"]
    assert [(row["case"], row["title"], row["wanted"]) for row in rows] == [
        (case.name, case.title, case.wanted) for case in CASES.values()
    ], "run `python -m tests.zoo --write`"
    # Samples that begin to depend on each other after the first split: the guide says that no comparison sees it.
    later = {"coupled_later", "experts_with_capacity"}
    assert {row["case"] for row in rows if "WRONG" in (row["training"], row["logs"])} <= later
    assert not [row["case"] for row in rows if row["training"] == "crashed"]


def test_every_architecture_and_every_seed_has_a_row() -> None:
    from benchmarks.techniques_sweep import tiny
    from benchmarks.techniques_sweep.architectures import RESULT, TECHNIQUES
    from benchmarks.techniques_sweep.combinations import NUMBER
    from benchmarks.techniques_sweep.combinations import RESULT as COMBINATIONS

    rows = json.loads(RESULT.read_text())["rows"]
    assert {row["model"] for row in rows} == set(tiny.architectures())
    assert all(set(row.get("verdicts", TECHNIQUES)) == set(TECHNIQUES) for row in rows)
    assert sum("verdicts" in row for row in rows) >= 200
    verdicts = [one["verdict"] for row in rows for one in row.get("verdicts", {}).values()]
    assert set(verdicts) == {"equal", "refused"}
    assert verdicts.count("refused") < 0.03 * len(verdicts)
    combinations = json.loads(COMBINATIONS.read_text())["rows"]
    assert {row["verdict"] for row in combinations} <= {"equal", "refused", "refused on the batch"}
    assert [row["seed"] for row in combinations] == list(range(NUMBER))


def test_live_bytes_of_gpt2_xl_keep_their_bars() -> None:
    from benchmarks.gpt2xl_live_bytes.table import RESULT

    cases = {case["name"]: case for case in json.loads(RESULT.read_text())["cases"]}
    assert set(cases) == {"gradients released", "gradients kept"}
    for case in cases.values():
        assert case["measured_bytes"] <= case["bar_bytes"]
        assert case["predicted_bytes"] == pytest.approx(case["measured_bytes"], rel=0.03)


def test_sizes_found_keep_their_bar() -> None:
    rows = json.loads((ROOT / "benchmarks/results/micro_batching_compare.json").read_text())["rows"]
    assert len(rows) >= 10
    for row in rows:
        ours = row["memfit"]
        assert ours["fraction"] >= 0.97 or ours["largest"] >= row["true_maximum"] - 1
        assert ours["steps"] <= 3
        assert ours["errors"] <= 1
        assert ours["later_errors"] == 0


def test_sizes_found_for_curves_keep_their_bar() -> None:
    rows = json.loads((ROOT / "benchmarks/results/micro_batching_compare.json").read_text())["curved"]
    assert len(rows) >= 10
    for row in rows:
        ours, true = row["memfit"], row["true_maximum"]
        assert row["checked"]
        assert ours["largest"] <= true
        assert ours["largest"] >= min(0.97 * true, true - 1)
        assert ours["steps"] <= (6 if row["kind"] == "untraceable" else 3)
        assert ours["errors"] <= 1
        assert ours["later_errors"] == 0
        longer = row.get("true_maximum_of_second_batch")
        if longer is not None:
            assert min(0.97 * longer, longer - 1) <= ours["size_of_second_batch"] <= longer


def test_readme_states_the_accuracy_that_was_measured() -> None:
    from benchmarks.estimator.table import summary

    document = json.loads((ROOT / "benchmarks/results/estimator_cpu.json").read_text())
    figures = summary([row["error_allocated"] for row in document["rows"]])
    sentence = (
        f"Over {figures['runs']} real training runs on the CPU the median error is {100 * figures['median']:.3f} %, "
        f"the largest {100 * figures['max']:.2f} %."
    )
    assert sentence in " ".join((ROOT / "README.md").read_text().split())


def test_readme_states_what_was_measured_on_cuda() -> None:
    from benchmarks.estimator.table import summary

    rows = json.loads((ROOT / "benchmarks/results/estimator_cuda.json").read_text())["rows"]
    allocated, reserved = (summary([row[f"error_{name}"] for row in rows]) for name in _FIGURES)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Over {allocated['runs']} on an H200" in readme
    assert (
        f"it is {100 * allocated['median']:.3f} % of allocated memory, the largest {100 * allocated['max']:.2f} %, and "
        f"{100 * reserved['median']:.2f} % and {100 * reserved['max']:.1f} % of reserved memory"
    ) in readme


def test_readme_states_what_was_predicted_on_a_card_that_was_new() -> None:
    from benchmarks.estimator.table import summary

    rows = json.loads((ROOT / "benchmarks/results/estimator_cuda_h100.json").read_text())["rows"]
    assert {row["gpu"] for row in rows} == {"NVIDIA H100 80GB HBM3"}
    allocated, reserved = (summary([row[f"error_{name}"] for row in rows]) for name in _FIGURES)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Over {allocated['runs']} on an H100" in readme
    assert (
        f"it is {100 * allocated['median']:.3f} %, the largest {100 * allocated['max']:.2f} %, and "
        f"{100 * reserved['median']:.2f} % and {100 * reserved['max']:.1f} %"
    ) in readme


def test_readme_states_how_the_flagship_ran() -> None:
    record = json.loads((ROOT / "benchmarks/results/gpu/fit_12gib_cuda.json").read_text())
    reserved = next(row for row in record["rows"] if "reserved" in row["what"])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"at {record['tokens_per_s']:,} tokens/s and reserves the {reserved['measured_gib']:.2f} GiB" in readme
    assert reserved["measured_gib"] == reserved["predicted_gib"]


def test_readme_shows_the_recorded_quickstart() -> None:
    report = json.loads((ROOT / "benchmarks/results/quickstart_cpu.json").read_text())["report"]
    peaks = [MemoryBreakdown.from_dict(report[name]).total() for name in ("predicted", "measured")]
    shown = (ROOT / "README.md").read_text().partition("<!-- begin: quickstart -->")[2]
    figures = [format_bytes(peak) for peak in peaks] + [f"{report['first_loss']:.4f} -> {report['last_loss']:.4f}"]
    assert [figure for figure in figures if figure not in shown] == []


def test_gpt2_xl_is_still_estimated_so() -> None:
    from benchmarks.estimator.example import RESULT, estimate

    recorded = json.loads(RESULT.read_text())["report"]
    report = json.loads(estimate("--json"))
    assert report["num_parameters"] == recorded["num_parameters"] == 1_557_611_200
    assert report["largest_micro_batch_size"] == recorded["largest_micro_batch_size"]
    for name in ("allocated_bytes", "reserved_bytes", "total_bytes"):
        assert report["peak"][name] == pytest.approx(recorded["peak"][name], rel=0.01), name
