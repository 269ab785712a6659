"""What goes wrong, what is promised, and the test that provokes it: `python -m tests.faults`.

    python -m tests.faults            # run all of them (`make faults`): benchmarks/results/faults.json, and the page
    python -m tests.faults --only preemption     # those whose test has this in its name; the others' figures stay
    python -m tests.faults --page     # only the page, docs/reliability.md

Every case is provoked for real: a second process, a signal, a small file system, flipped bytes. They run in
`make test` or `make nightly`, too; here, kills of sharded runs are repeated 20 times (`MEMFIT_KILLS`), and memory runs
out at 20 random moments (`MEMFIT_MOMENTS`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.runner import write
from benchmarks.text import insert

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
KILLS = MOMENTS = "20"


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong."""

    fault: str
    promise: str
    test: str
    """File and function below `tests/`."""


def _cases(file: str, *rows: tuple[str, str, str]) -> tuple[Case, ...]:
    return tuple(Case(fault, promise, f"{file}::{function}") for fault, promise, function in rows)


_CHECKPOINTS = "nightly/strategies/test_checkpoint_io.py"
_MISTAKES = "commands/cli/test_mistakes.py"
GROUPS: dict[str, tuple[Case, ...]] = {
    "Memory runs out": (
        *_cases(
            "numerics/test_micro_batching.py",
            (
                "in forward, backward or a step, at random",
                "the batch is repeated in parts; weights are the undisturbed run's",
                "test_random_errors_change_nothing",
            ),
            ("on one of two ranks under DDP", "both repeat the batch", "test_error_on_one_rank_alone"),
            (
                "and not one sample fits",
                "one message with the largest tensors",
                "test_below_one_sample_the_error_names_the_largest_tensors",
            ),
        ),
        *_cases(
            "ranks/test_sharded_recovery.py",
            (
                "on one rank under FSDP2, hybrid sharding or tensor parallelism, while a size or shape is new",
                "all repeat the batch; weights within 2e-7",
                "test_memory_that_runs_out_on_one_rank_changes_nothing",
            ),
            (
                "at 20 random moments of the first two steps",
                "the same",
                "test_random_moments",
            ),
        ),
        *_cases(
            "ranks/test_sharded_failures.py",
            (
                "on one rank under FSDP2, in a step whose size and shapes had fitted before",
                "all end within 60 s and name the rank and a smaller `micro_batch_size`",
                "test_a_shortage_in_what_had_fitted_ends_all",
            ),
        ),
        *_cases(
            "ranks/test_zero_micro_batching.py",
            (
                "on one rank under ZeRO",
                "all ranks end within seconds and name the size with which `fit` goes on",
                "test_a_shortage_ends_all_ranks_and_the_run_goes_on",
            ),
        ),
    ),
    "A rank ends": _cases(
        "ranks/test_sharded_failures.py",
        (
            "by an error of Python",
            "all end within 60 s; the others name its rank and message",
            "test_an_error_on_one_rank_ends_all",
        ),
        ("by SIGKILL", "the others end within 60 s and name it", "test_a_killed_rank_is_named"),
        (
            "by either, under DDP, FSDP2 and ZeRO without `MicroBatching`",
            "the others name its rank and message",
            "test_a_rank_that_ends_is_named_without_micro_batches",
        ),
        ("of three", "the other two end", "test_three_ranks_end_when_one_does"),
    ),
    "A run is ended": (
        *_cases(
            "numerics/reliability/test_preemption.py",
            (
                "by SIGTERM, SIGINT, SIGUSR1 or SIGHUP in forward, backward, step, save or validation",
                "a checkpoint at the next step; exit code 143, 130, 138 or 129; resumed bitwise",
                "test_the_run_ends_at_a_step_and_goes_on_exactly",
            ),
            (
                "by a signal in or before a validation, or at an epoch's end, with early stopping, a scheduler on a "
                "plateau, checkpoints by a metric, and dropout",
                "what watches validation sees the same figures; weights and learning rate are the undisturbed run's",
                "test_what_watches_validation_sees_the_same",
            ),
            (
                "twice, by two runs that share a folder",
                "neither replaces the other's checkpoint",
                "test_runs_that_share_a_folder_replace_none_of_each_other",
            ),
            (
                "by a signal to one of two ranks, under DDP, FSDP2, ZeRO-2 and ZeRO-3",
                "both end at the same step; resumed bitwise",
                "test_a_signal_for_one_of_two_ranks_ends_both",
            ),
            ("before its first step", "it ends at once", "test_before_the_first_step_the_run_ends_at_once"),
            (
                "by the end of its terminal",
                "a checkpoint at the next step, whatever is printed meanwhile",
                "test_the_end_of_a_terminal",
            ),
            (
                "by SLURM, which requeues it (USR1)",
                "`hpc_ckpt_N.ckpt` at the next step, from which it goes on bitwise",
                "test_slurm_requeues_at_a_step",
            ),
            (
                "by Ctrl-C, with loader processes alive",
                "they go on until the step is done",
                "test_workers_of_a_loader_go_on_until_the_step_is_done",
            ),
            (
                "by a signal in `memfit fit`",
                "exit code 128 + its number",
                "test_the_command_ends_with_the_signals_code",
            ),
            ("and the next step takes longer than the grace time", "it ends then", "test_the_grace_time_is_an_end"),
        ),
        *_cases(
            "nightly/test_checkpoint_kills.py",
            (
                "by SIGKILL at a random moment while `last.ckpt` is rewritten: one device, DDP, FSDP2, ZeRO-1 to -3, "
                "to the host and to disk, tensor parallelism",
                "the last complete checkpoint loads",
                "test_the_last_complete_checkpoint_always_loads",
            ),
        ),
        *_cases(
            _CHECKPOINTS,
            (
                "by SIGKILL inside the write of one file",
                "the former file is whole",
                "test_a_run_that_is_killed_while_it_writes_leaves_a_whole_file",
            ),
        ),
    ),
    "Checkpoints": _cases(
        _CHECKPOINTS,
        (
            "one bit is flipped, and the file renamed",
            "it is refused",
            "test_one_flipped_bit_is_found_in_a_renamed_copy",
        ),
        (
            "cut short",
            "it is refused",
            "test_a_file_that_was_cut_is_damaged",
        ),
        ("no checkpoint but another archive", "one message that says what it is", "test_another_archive_is_named"),
        (
            "missing, truncated, empty or foreign",
            "one message that names the file, and exit code 2",
            "test_the_command_line_says_it_in_one_message",
        ),
        (
            "a folder of shards is damaged",
            "it is refused, and the last good one named",
            "test_a_damaged_folder_is_refused_with_the_last_good_one",
        ),
        (
            "the disk gets full while writing",
            "the former checkpoint stays, and nothing else",
            "test_a_disk_that_gets_full_leaves_the_former_one",
        ),
        (
            "the same with `save_top_k=1` or `last`",
            "one good checkpoint stays",
            "test_one_kept_checkpoint_survives_a_disk_that_fills_up",
        ),
        ("code is hidden in a file", "it never runs", "test_code_hidden_in_a_file_never_runs"),
        ("code is hidden in a folder of shards", "it never runs", "test_code_hidden_in_a_sharded_folder_never_runs"),
    ),
    "Several at once": (
        *_cases(
            "rules/strategies/test_checkpoint_folder.py",
            (
                "a link, to a checkpoint or to nothing, in a checkpoint's place",
                "the link is replaced, and what it leads to stays",
                "test_a_link_in_a_checkpoints_place_is_replaced",
            ),
        ),
        *_cases(
            "nightly/strategies/test_failed_saves.py",
            (
                "a rank can't write its part, under ZeRO-2, ZeRO-3 and FSDP2",
                "all ranks end within 60 s, name it, and the checkpoint before stays",
                "test_a_rank_that_fails_inside_a_save_ends_the_others",
            ),
        ),
    ),
    "Kernels that are compiled": _cases(
        "rules/nvme/test_extensions.py",
        (
            "the process that compiles or loads DeepSpeed's kernels is killed",
            "who waits takes over",
            "test_who_waits_takes_over_from_who_is_killed",
        ),
        (
            "it had torch's own lock, and nobody has it",
            "nobody waits for it",
            "test_compiling_does_not_wait_for_nobody",
        ),
    ),
    "Hidden code": _cases(
        "ranks/test_payloads.py",
        (
            "in a checkpoint of one device, FSDP2 or ZeRO, for `fit` and `export`",
            "it never runs; one message and exit code 2",
            "test_checkpoints_of_each_strategy",
        ),
        ("in a plan", "the same", "test_plans"),
        ("in entries of the cache", "it never runs, and they are made anew", "test_cache_entries_are_made_anew"),
        ("in a file of data", "it never runs; one message and exit code 2", "test_data_files"),
        ("in tokens that were kept", "the same", "test_tokens_in_the_cache_of_data"),
        ("beside a model or tokenizer", "the same", "test_code_beside_a_model_or_tokenizer"),
    ),
    "Accumulation windows": _cases(
        "numerics/reliability/test_whole_steps.py",
        (
            "a run goes on from a save between windows: by steps, a validation or an epoch's end",
            "resumed bitwise",
            "test_every_checkpoint_goes_on_exactly",
        ),
        ("the same under FSDP2, ZeRO-2 and ZeRO-3", "the same", "test_under_strategies"),
        (
            "a save is made inside a window, by a validation or a hook",
            "one warning names the batches that are not in it",
            "test_a_save_inside_a_window_warns",
        ),
        ("an error ends a window", "the same", "test_an_error_says_what_its_checkpoint_lacks"),
    ),
    "Data": (
        *_cases(
            "ranks/test_data_position.py",
            (
                "resumed with another batch size, accumulation, number of ranks or workers",
                "each sample exactly once an epoch",
                "test_each_sample_once_an_epoch",
            ),
            ("after two such changes", "the same", "test_after_two_changes"),
            (
                "resumed with another seed, or another number of samples",
                "a warning names what changed, and the epoch's data begin anew",
                "test_another_order_begins_the_epoch_anew",
            ),
        ),
        *_cases(
            "rules/data/test_text.py",
            (
                "a row without text, text that is not UTF-8, a file that is no JSON or Parquet",
                "one message that names the data, and the first row without text",
                "test_faults_name_the_data",
            ),
        ),
    ),
    "Caches and plans": (
        *_cases(
            "rules/memory/test_cache_files.py",
            ("the drive is full", "one warning; the command goes on", "test_a_full_drive"),
            ("the drive is read-only", "the same", "test_a_read_only_drive"),
            ("a file is where the folder should be", "the same", "test_a_file_where_the_folder_should_be"),
        ),
        *_cases(
            "commands/test_plan.py",
            (
                "a plan's file over an edited recipe",
                "it is refused, and what differs named",
                "test_from_the_plan_to_the_run",
            ),
        ),
    ),
    "Mistakes": (
        *_cases(
            _MISTAKES,
            ("in a recipe or an option, some 30 kinds", "one message, exit code 2", "test_mistakes"),
        ),
        *_cases(
            "commands/cli/test_fuzz.py",
            (
                "mutated recipes and command lines (300 by `make fuzz`)",
                "no traceback, an answer within 10 s",
                "test_mutated_input_ends_in_one_message",
            ),
        ),
    ),
    "Trackers and numbers": (
        *_cases(
            "commands/test_tracker_faults.py",
            ("a logger raises", "said once; training goes on", "test_a_logger_that_raises_is_said_once"),
        ),
        *_cases(
            "numerics/reliability/test_non_finite.py",
            (
                "gradients that are no numbers, with `NonFiniteGuard`",
                "the step is left out, its first parameter named",
                "test_a_step_is_left_out",
            ),
            (
                "running statistics that such a step spoils",
                "they are put back with it",
                "test_buffers_are_put_back_with_the_step",
            ),
            (
                "of one of several optimizers",
                "the others step",
                "test_an_optimizer_loses_its_own_gradients_only",
            ),
            (
                "several such steps in a row",
                "the run ends, and leaves a checkpoint",
                "test_several_in_a_row_end_the_run",
            ),
            (
                "on one of two ranks, under DDP, FSDP2 and ZeRO-1 to -3",
                "both leave the step out; weights are DDP's within 1e-6",
                "test_ranks_agree",
            ),
            (
                "in `memfit fit`, without a word of it in the recipe",
                "the run ends with a checkpoint of finite weights",
                "test_the_command_has_one_unless_it_is_told",
            ),
        ),
    ),
}

MARK = "last run"


def cases() -> list[Case]:
    """All cases."""
    return [case for group in GROUPS.values() for case in group]


def page(record: dict[str, Any] | None) -> str:
    """The page, with what the last run found."""
    return insert(PAGE.read_text(encoding="utf-8"), MARK, summary(record))


def summary(record: dict[str, Any] | None) -> str:
    """One sentence on the last run, and the cases that failed in it."""
    if record is None:
        return "The cases were not run."
    rows = record["rows"]
    failed = [row for row in rows if row["failed"]]
    kills = sum(row.get("figures", {}).get("kills", 0) for row in rows)
    return "\n".join(
        [
            f"Last run: {sum(row['passed'] for row in rows)} tests of {len(rows)} cases passed, with {kills} kills, in "
            f"{record['seconds'] / 60:.0f} minutes on {record['hardware']['cores']} cores with torch "
            f"{record['versions']['torch']}.",
            *(f"- `{row['test']}`: **{row['failed']} failed**" for row in failed),
        ]
    )


def run(only: str = "") -> dict[str, Any]:
    """Run cases in one process of pytest, and say how the tests of each ended.

    Args:
        only: A part of the names of their tests.
    """
    started = time.monotonic()
    os.environ.setdefault("MEMFIT_KILLS", KILLS)
    os.environ.setdefault("MEMFIT_MOMENTS", MOMENTS)
    chosen = [case for case in cases() if only in case.test]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = sorted({f"{ROOT}/tests/{case.test}" for case in chosen})
        options = ["-q", "-n", "2", "--dist", "loadfile", "--timeout", "900", f"--junitxml={report}"]
        pytest.main([*options, *tests])
        found = list(ElementTree.parse(report).iter("testcase"))
    rows = [_row(case, found) for case in chosen]
    return {"rows": rows, "seconds": round(time.monotonic() - started, 1), "kills": os.environ["MEMFIT_KILLS"]}


def _row(case: Case, found: list[ElementTree.Element]) -> dict[str, Any]:
    """How the tests of a case ended, and the sums of the numbers that they recorded."""
    file, _, function = case.test.partition("::")
    module = "tests." + file.removesuffix(".py").replace("/", ".")
    own = [t for t in found if t.get("classname") == module and (t.get("name") or "").split("[")[0] == function]
    failed = sum(t.find("failure") is not None or t.find("error") is not None for t in own)
    skipped = sum(t.find("skipped") is not None for t in own)
    row = {"test": case.test, "passed": len(own) - failed - skipped, "failed": failed or int(not own)}
    figures: dict[str, int] = {}
    for noted in (noted for test in own for noted in test.iter("property")):
        figures[noted.get("name") or ""] = figures.get(noted.get("name") or "", 0) + int(noted.get("value") or 0)
    return row | {"skipped": skipped} | ({"figures": figures} if figures else {})


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A record with the rows of some cases replaced, in the order of the cases."""
    rows = {row["test"]: row for row in (*before["rows"], *now["rows"])}
    ordered = [rows[case.test] for case in cases() if case.test in rows]
    return {"rows": ordered, "seconds": round(before["seconds"] + now["seconds"], 1), "kills": now["kills"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, or write the page alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page from the last results")
    parser.add_argument("--only", default="", metavar="WORD", help="run the cases whose test has this in its name")
    options = parser.parse_args(argv)
    if not options.page:
        found = run(options.only)
        before = json.loads(RESULTS.read_text(encoding="utf-8")) if options.only and RESULTS.exists() else None
        write(RESULTS, found if before is None else _merged(before, found))
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    PAGE.write_text(page(record), encoding="utf-8")
    return int(record is not None and any(row["failed"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
