"""The zoo of `benchmarks/micro_batching`: its judge tells right from wrong, and a sample of it is exact or refused."""

from dataclasses import replace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from benchmarks.micro_batching.exactness import SHRINK, examine, judge, main, train
from benchmarks.micro_batching.zoo import CASES, THEMES
from benchmarks.micro_batching.zoo.base import Case, Supervised
from lightning_memfit.fitting import MicroBatching

# Cases that have to be exact, or refused: any of `benchmarks/micro_batching/zoo`, a few of each theme.
SAMPLE = (
    "token_labels",
    "vae_own_noise",
    "ctc",
    "class_weights_with_hook",
    "teacher_in_hook",
    "after_backward",
    "two_loaders_different",
    "nested_dict",
    "graphs_with_hooks",
    "accumulate_ragged",
    "log_collection",
    "dropout",
    "adversarial",
    "labels_in_tuple",
    "labels_masked_later",
    "own_shifted_labels",
    "float_mask",
    "time_first",
    "class_weights",
    "sum",
    "clip",
    "mixup",
    "functional_batch_norm",
    "spectral_norm",
    "teacher_in_step",
    "annealed_by_attribute",
    "own_generator",
    "popped_labels",
    "inputs_in_place",
    "ragged_lists",
    "tabular_with_metadata",
    "skips_by_content",
    "log_tokens",
    "log_mean_of_loss",
)

QUICK = ("token_labels", "class_weights", "spectral_norm", "teacher_in_step", "inputs_in_place", "time_first")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in SAMPLE]
)
def test_exact_or_refused(name: str) -> None:
    case = CASES[name]
    row = examine(case)
    assert row["training"] in {"equal": {"equal"}, "accepted": {"accepted"}}.get(case.wanted, {"equal", "refused"}), row
    assert row["logs"] != "WRONG", row


def test_the_zoo_is_large_and_its_names_differ() -> None:
    assert len(CASES) == sum(map(len, THEMES.values())) >= 50


# --- the judge ------------------------------------------------------------------------------------------------------


def _verdict(case: Case, callback: MicroBatching) -> str:
    return judge(case, train(case, None), train(case, callback)).training


def test_other_weights_are_wrong() -> None:
    """CLIP sees fewer negatives in a micro-batch, and nobody is to stop it."""
    callback = MicroBatching(micro_batch_size=4, allow_batch_statistics=True)
    assert _verdict(CASES["clip"], callback) == "WRONG"


def test_an_error_of_the_module_is_a_crash_and_no_refusal() -> None:
    class Breaking(Supervised):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("too few samples")
            return super().training_step(batch, batch_idx)

    case = Case("breaking", "", Breaking)
    assert _verdict(case, MicroBatching(micro_batch_size=2)) == "crashed"


def test_a_refusal_after_the_first_step_is_a_crash() -> None:
    class Late(Supervised):
        def on_train_batch_end(self, *_):
            raise MisconfigurationException("too late")

    case = CASES["ragged_last_batch"]
    plain = train(case, None)
    found = judge(case, plain, train(replace(case, build=Late), None))
    assert (found.training, found.steps) == ("crashed", 1)
    assert found.message.endswith("too late")


def test_other_weights_at_an_error_are_wrong() -> None:
    class Moved(Supervised):
        def training_step(self, batch, batch_idx):
            self.net[0].weight.data.add_(1)
            raise MisconfigurationException("no")

    case = CASES["ragged_last_batch"]
    assert judge(case, train(case, None), train(replace(case, build=Moved), None)).training == "WRONG"


def test_logged_values_are_judged_apart_from_weights() -> None:
    case = CASES["log_nonlinear"]

    class Other(type(case.build())):
        def write(self, out, y, loss):
            super().write(out, y, loss + 1)

    class Warned(Other):
        def on_train_start(self):
            rank_zero_warn("`perplexity` is not what it seems.")

    plain = train(case, None)
    for kind, verdict in ((Other, "WRONG"), (Warned, "warned")):
        found = judge(case, plain, train(replace(case, build=kind), None))
        assert (found.training, found.logs) == ("equal", verdict)
        assert set(found.logs_differ) == {"perplexity", "perplexity_step", "perplexity_epoch"}


def test_memory_runs_out_in_the_fourth_step() -> None:
    case = CASES["ragged_last_batch"]
    callback = MicroBatching()
    run = train(case, callback, fails=True)
    assert run.failures
    assert run.error is None
    assert [(step, size) for step, size, _ in callback.changes] == [(0, 8), (3, 4)]


def test_a_case_that_never_runs_out_of_memory_is_no_case() -> None:
    class Miscounted(Supervised):
        def samples_in(self, batch):
            return 0

    with pytest.raises(RuntimeError, match="samples_in"):
        examine(Case("miscounted", "", Miscounted))


def test_command_writes_a_record(tmp_path, capsys) -> None:
    main(["--only", "ragged_last_batch", "--output", str(tmp_path / "result.json")])
    assert "ragged_last_batch" in capsys.readouterr().out
    assert SHRINK in (tmp_path / "result.json").read_text()
    with pytest.raises(SystemExit):
        main(["--only", "ragged_last"])
    assert "ragged_last_batch?" in capsys.readouterr().err
