"""The zoo: its judge tells right from wrong, and verdicts are those of the committed table."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.step.check import SelfCheck
from tests.zoo import CASES, THEMES
from tests.zoo.__main__ import main, read_table, try_all
from tests.zoo.base import Case, Supervised
from tests.zoo.compare import examine, judge, train
from tests.zoo.trial import Trial, is_met
from tests.zoo.trials import all_trials

SAMPLE = {
    "MicroBatching: token_labels",
    "MicroBatching: Contrastive",
    "MicroBatching: PaddedWithAToken",
    "ActivationCheckpointing: Norms",
}


def verdicts(*options: str) -> dict[str, str]:
    """What the command says of each trial: a process of its own has no descriptors that other tests have left."""
    ended = subprocess.run([sys.executable, "-m", "tests.zoo", *options], capture_output=True, text=True, check=True)
    found = {}
    for trial in all_trials():
        said = re.search(rf"^{re.escape(trial.key)}: (.+?) \([\d.]+ s\)", ended.stdout, re.MULTILINE)
        if said:
            found[trial.key] = said[1]
    return found


def test_verdicts_of_a_sample_are_those_of_the_table() -> None:
    found, known = verdicts("--only", *(key.split(": ", 1)[1] for key in sorted(SAMPLE))), read_table()
    assert found.keys() >= SAMPLE
    assert found == {key: known[key] for key in found}


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_all_verdicts_are_those_of_the_table() -> None:
    assert verdicts() == read_table(), "run `python -m tests.zoo --write`, and see what moved"


def test_every_trial_has_a_row_of_its_own() -> None:
    trials = all_trials()
    assert sorted(trial.key for trial in trials) == sorted(read_table()), "run `python -m tests.zoo --write`"
    assert len(CASES) == sum(map(len, THEMES.values())) >= 50


@pytest.mark.parametrize(
    ("wanted", "verdict", "expected"),
    [
        ("exact", "exact", True),
        ("exact", "exact, logs warned; 8 refused", True),
        ("exact", "exact, logs WRONG", False),
        ("exact or refused", "refused", True),
        ("refused", "crashed: ValueError", False),
    ],
)
def test_what_is_wanted_is_met(wanted: str, verdict: str, expected: bool) -> None:
    assert is_met(wanted, verdict) == expected


@pytest.mark.parametrize(
    ("code", "verdict"), [("import os; os._exit(1)", "ended"), ("while True: pass", "did not end")]
)
def test_a_trial_may_end_its_process_or_never_end(code: str, verdict: str) -> None:
    trial = Trial("bad", "", "exec", "exact", "", lambda: str(exec(code)), seconds=0.5)
    assert try_all([trial]) == {"exec: bad": (verdict, None)}


# --- the judge ------------------------------------------------------------------------------------------------------


def _verdict(case: Case, callback: MicroBatching) -> str:
    return judge(case, train(case, None), train(case, callback)).training


def test_other_weights_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP sees fewer negatives in a micro-batch, and nobody is to stop it."""
    monkeypatch.setattr(SelfCheck, "_compare", lambda *_: None)
    assert _verdict(CASES["clip"], MicroBatching(micro_batch_size=4)) == "WRONG"


def test_an_error_of_the_module_is_a_crash_and_no_refusal() -> None:
    class Breaking(Supervised):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("too few samples")
            return super().training_step(batch, batch_idx)

    case = Case("breaking", "", Breaking)
    assert _verdict(case, MicroBatching(micro_batch_size=2)) == "crashed"


def test_a_refusal_after_the_first_step_is_told_apart() -> None:
    class Late(Supervised):
        def on_train_batch_end(self, *_):
            raise MisconfigurationException("too late")

    case = CASES["ragged_last_batch"]
    plain = train(case, None)
    found = judge(case, plain, train(replace(case, build=Late), None))
    assert (found.training, found.steps) == ("refused later", 1)
    assert found.message.endswith("too late")


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


def test_command_shows_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "ragged_last_batch"])
    assert "MicroBatching: ragged_last_batch: exact" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--only", "ragged_last"])
    assert "ragged_last_batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--write", "--only", "ragged_last_batch"])
