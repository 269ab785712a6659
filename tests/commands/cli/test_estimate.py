import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from cli.arguments import configs_of, read_arguments
from cli.estimate import make_parser
from cli.estimate_recipe import _ranks, devices_here, division_of_recipe
from cli.main import main
from cli.recipe_run import RecipeRun
from lightning_memfit.estimate.target import Target, unnamed_target

DATA = [
    "--data=lightning_memfit.data.StandardLibraryText",
    "--data.tokenizer=bytes",
    "--data.sequence_length=64",
    "--data.batch_size=2",
    "--data.max_files=20",
]
MODEL = [
    "--model=lightning_memfit.models.CausalLM",
    "--model.config={model_type: gpt2, n_layer: 2, n_embd: 64, n_head: 2, vocab_size: 258, n_positions: 64}",
]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("trainer: {max_steps: 4, logger: true, accelerator: cpu}\n")
    return ["--config", str(path), *MODEL, *DATA]


def estimate(capsys, *arguments):
    code = main(["estimate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "ours", "theirs"),
    [
        (["--model", "gpt2", "--json"], {"model": "gpt2", "json": True}, []),
        (["--config", "a", "--model", "X"], {"config": ["a"]}, ["--config", "a", "--model", "X"]),
        (["-c=a", "--model.x=1", "--device", "T4"], {"config": ["a"], "device": "T4"}, ["-c=a", "--model.x=1"]),
        (["--micro_batch_size=2", "--model", "gpt2"], {"micro_batch_size": 2, "model": "gpt2"}, []),
        (["--data.b", "16", "--json", "-c", "a"], {"json": True, "config": ["a"]}, ["--data.b", "16", "-c", "a"]),
        (["-c", "a", "--trainer.n=-1", "-1"], {"config": ["a"]}, ["-c", "a", "--trainer.n=-1", "-1"]),
    ],
)
def test_options_are_told_apart(arguments, ours, theirs):
    read, left = read_arguments(make_parser(bool(configs_of(arguments))), arguments)
    assert {name: value for name, value in vars(read).items() if value not in (None, False)} == ours
    assert left == theirs


# --- a recipe ---------------------------------------------------------------------------------------------------------


def test_recipe_for_a_gpu_is_estimated_without_one_and_leaves_nothing(capsys, recipe, tmp_path):
    code, report = estimate(capsys, *recipe, "--device", "RTX 3060", "--trainer.accelerator=gpu", "--no-cache")
    assert code == 0
    assert report["device"]["name"] == "RTX 3060 12GB"
    assert report["device"]["capability"] == [8, 6]
    assert report["verdict"]["fits"] is True
    assert report["micro_batch_size"] == 2
    assert report["sequence_length"] == 64
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.yaml", "cache"}
    assert not (tmp_path / "cache" / "profiles").exists()


def test_exit_codes_and_largest_micro_batch(capsys, recipe):
    code, report = estimate(capsys, *recipe, "--device", "900MiB")
    assert code == (0 if report["verdict"]["fits"] else 1)
    largest = report["largest_micro_batch_size"]
    assert largest >= 1
    for size, expected in ((largest, 0), (largest + 1, 1)):
        code, report = estimate(capsys, *recipe, "--device", "900MiB", "--micro-batch-size", str(size))
        assert (code, report["micro_batch_size"]) == (expected, size)


def test_recipe_without_device_is_held_against_this_machine(capsys, recipe):
    code, report = estimate(capsys, *recipe)
    assert code == 0
    assert report["device"]["kind"] == "cpu"
    code, report = estimate(capsys, *recipe, "--trainer.callbacks+={class_path: lightning_memfit.device.limit.MemoryLimit, init_args: {limit: 1MiB}}")  # fmt: skip # noqa: E501
    assert code == 1
    assert report["device"]["capacity_bytes"] == 1 << 20


def test_recipe_that_insists_on_a_gpu_gets_no_verdict(capsys, recipe, monkeypatch):
    monkeypatch.setattr("cli.estimate_recipe.live_target", lambda *_: None)
    code, report = estimate(capsys, *recipe, "--trainer.accelerator=cuda")
    assert code == 2
    assert report["verdict"]["fits"] is None
    assert any("--device" in note for note in report["notes"])


def test_table_reads_well(capsys, recipe, tmp_path):
    page = tmp_path / "page.html"
    assert main(["estimate", *recipe, "--device", "12GiB", "--timeline", str(page)]) == 0
    output = capsys.readouterr().out
    for text in (
        "bytes per parameter",
        "optimizer states",
        "Largest tensors",
        "Peak by phase",
        "reserved",
        "Fits: needs",
    ):
        assert text in output
    assert page.read_text().startswith("<!doctype html>")
    assert main(["estimate", *recipe, "--timeline", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err


UNTRACEABLE = """
import torch, lightning.pytorch as pl
class Branching(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, batch_idx):
        output = self.layer(batch[0])
        kept = output[output > 0]
        return kept.square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=2)
"""


def test_step_that_cannot_be_traced_says_how_to_measure(capsys, tmp_path, monkeypatch):
    (tmp_path / "branching.py").write_text(UNTRACEABLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "b.yaml").write_text("model: branching.Branching\ntrainer: {max_steps: 2, accelerator: cpu}\n")
    assert main(["estimate", "--config", "b.yaml", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--measure" in captured.err
    code, report = estimate(capsys, "--config", "b.yaml", "--measure")
    assert code == 0
    assert report["profile"]["method"] == "measured"
    assert any("Measured" in note for note in report["notes"])


# --- a named model ----------------------------------------------------------------------------------------------------


def test_named_model(capsys):
    code, report = estimate(
        capsys, "--model", "gpt2", "--micro-batch-size", "2", "--sequence-length", "128", "--precision", "bf16-mixed",
        "--checkpointing", "full", "--device", "RTX 3060",
    )  # fmt: skip
    assert code == 0
    assert report["num_parameters"] == 124_439_808
    assert report["peak"]["breakdown"]["device"]["optimizer_state"] == pytest.approx(8 * 124_439_808, rel=0.01)
    assert report["largest_micro_batch_size"] > 2


DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.mark.nightly_cases("memfit_zero_offload", "memfit_zero_infinity")
@DEEPSPEED
@pytest.mark.parametrize(
    ("strategy", "host", "disk"),
    [("memfit_zero_2", False, False), ("memfit_zero_offload", True, False), ("memfit_zero_infinity", True, False)],
)  # no tensor of this model is large enough for a file
def test_a_recipe_under_deepspeed_has_the_figures_of_a_rank(capsys, recipe, strategy, host, disk):
    options = ["--device", "12GiB", "--trainer.devices=2", "--trainer.precision=bf16-mixed"]
    _, report = estimate(capsys, *recipe, *options, f"--trainer.strategy={strategy}")
    assert report["strategy"]["name"] == strategy
    assert (report["precision"], report["strategy"]["ranks"]) == ("bf16-mixed", 2)
    assert not any("not in the figures" in note for note in report["notes"])
    peak = report["peak"]["breakdown"]
    assert bool(peak.get("host")) == host
    assert bool(peak.get("disk")) == disk
    states = sum(tier.get("optimizer_state", 0) for tier in peak.values())
    # What would be in files counts whole as states: masters, gradients, moments and weights.
    each = 20 if strategy == "memfit_zero_infinity" else 12
    assert states == pytest.approx(each * report["num_parameters"] / 2, rel=0.02)
    assert (report["verdict"]["host_needed_bytes"] > 0) == host


@pytest.mark.nightly_cases("zero_offload")
@pytest.mark.parametrize("name", ["zero_offload", "memfit_zero_offload"])
def test_a_named_model_is_divided_by_a_named_strategy(capsys, name):
    named = ["--model", "gpt2", "--sequence-length", "64", "--precision", "bf16-mixed", "--device", "12GiB"]
    code, report = estimate(capsys, *named, "--strategy", name, "--devices", "4")
    assert code == 0
    peak, share = report["peak"]["breakdown"], 124_439_808 / 4
    assert peak["host"]["optimizer_state"] == pytest.approx(12 * share, rel=1e-3)  # masters and two states, in fp32
    assert peak["device"]["parameter"] == pytest.approx(2 * 4 * share, rel=1e-3)
    assert report["precision"] == "bf16-mixed"
    assert report["verdict"]["host_needed_bytes"] == 4 * sum(peak["host"].values())


def test_all_gpus_of_this_machine_count_where_the_recipe_takes_all(monkeypatch):
    """Lightning makes it DDP, whose buckets were not in the figures."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    run = RecipeRun(None, None, None, (), "auto", "auto", None, 1, None)
    here, cpu = Target("a card", "cuda", 1 << 30), Target("this CPU", "cpu", 1 << 30)

    def division_on(target, run=run):
        return division_of_recipe(replace(run, devices=devices_here(run, None, None, target)))[0]

    division = division_on(here)
    assert (division.stage, division.ranks, division.copies_gradients) == (0, 4, True)
    assert division_on(here, replace(run, devices=1)) is None
    assert division_on(cpu) is None
    assert division_on(unnamed_target()) is None


@pytest.mark.nightly
def test_named_model_with_techniques(capsys):
    """Adapters beside 4-bit weights: the callbacks of recipes are traced, so that the figures are theirs."""
    named = ["--model", "gpt2", "--sequence-length", "64", "--device", "12GiB"]
    _, plain = estimate(capsys, *named)
    _, tuned = estimate(capsys, *named, "--technique", "qlora:rank=4", "--technique", "activation_checkpointing")
    before, after = (report["peak"]["breakdown"]["device"] for report in (plain, tuned))
    weights = 12 * 12 * 768**2  # of the linear layers; what is left are embeddings, norms and biases in fp32
    saved = before["parameter"] - after["parameter"] - after["buffer"]  # codes are buffers
    assert saved == pytest.approx(weights * (4 - 0.516), rel=0.02)  # half a byte, a scale per 64, the adapters
    trained = 4 * 12 * (768 * (768 + 2304) + 768 * (768 + 768) + 2 * 768 * (768 + 3072)) // 768
    assert after["optimizer_state"] == pytest.approx(2 * 4 * trained, rel=0.01)
    _, again = estimate(capsys, *named, "--technique", "qlora:rank=4", "--technique", "activation_checkpointing")
    assert again == tuned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--technique", "lara"], "Closest: lora"),
        (["--technique", "lora:r=4"], "Closest: rank"),
        (["--technique", "lora:rank"], "`rank` has no value"),
        (["--technique", "lora", "--technique", "qlora"], "both decide the adapter"),
        (["--technique", "bf16_true"], "Pass `--precision bf16-true`"),
        (["--technique", "zero_2"], "changes nothing that one device's memory shows"),
        (["--technique", "tf32"], "changes nothing that one device's memory shows"),
    ],
)
def test_techniques_that_a_trace_cannot_show_are_refused(capsys, arguments, message):
    assert main(["estimate", "--model", "gpt2", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config RECIPE"),
        (["--model", "gpt5"], "Closest: gpt2"),
        (["--model", "gpt2", "--trainer.precision=16"], "needs `--config`"),
        (["--model", "gpt2", "--device", "RTX 9999"], "RTX 9999"),
        (["--model", "gpt2", "--optimizer", "adamv"], "adamv"),
        (["--model", "gpt2", "--measure"], "needs a recipe"),
        (["--config", "quickstart", "--precision", "16-true"], "A recipe states it"),
        (["--config", "quickstrat"], "quickstart"),
        (["--model", "gpt2", "--micro-batch-size", "0"], "at least 1"),
        (["--model", "gpt2", "--micro-batch-size", "-3"], "-3 must be at least 1"),
        (["--config", "quickstart", "--micro-batch-size", "100000000000000000000"], "must be at most 2,147,483,647"),
        (["--model", "gpt2", "--micro-batch-size", "9" * 5000], "999...' is no whole number"),
        (["--model", "gpt2", "--micro-batch-size", "1e3"], "'1e3' is no whole number"),
        (["--model", "gpt2", "--accumulate-grad-batches", "0"], "at least 1"),
        (["--model", "t5-small", "--sequence-length", "2000000000"], "at most 1,048,576 tokens are traced"),
        (["--model", "gpt2", "--device", ""], "`device=''` is unknown"),
        (["--model", "gpt2", "--device", "0GiB"], "positive size"),
        (["--model", "gpt2", "--device", "99999999999999999TiB"], "less than 8 EiB"),
        (["--model", "gpt2", "--devices", "2"], "needs `--strategy`"),
        (["--model", "gpt2", "--device", "2x 24GiB"], "needs `--strategy`"),
        (["--model", "gpt2", "--device", "2x 24GiB", "--devices", "4", "--strategy", "ddp"], "Drop one"),
        (["--config", "quickstart", "--device", "2x 24GiB", "--trainer.devices=4"], "names 2 devices, the recipe 4"),
        (["--model", "gpt2", "--strategy", "zero_9"], "Choose from: ddp"),
        (["--config", "quickstart", "--strategy", "zero_2"], "A recipe states it"),
        (["--model", "gpt2", "--technique", "lora:rank=many"], "an option has the wrong type"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    assert main(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_cached_answer_needs_neither_torch_nor_lightning():
    code = """
import sys
from lightning_memfit.cli.main import main
main(["estimate", "--model", "gpt2", "--sequence-length", "64", "--micro-batch-size", "2", "--device", "12GiB"])
print("torch" in sys.modules, "lightning" in sys.modules, file=sys.stderr)
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert runs[0].stderr.split()[-2:] == ["True", "False"]
    assert runs[1].stderr.split()[-2:] == ["False", "False"]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.nightly
def test_a_recipe_imports_nothing_that_it_does_not_name(recipe):
    """Fitting, strategies and the planner are most of the package, and no part of an estimate."""
    code = (
        "import sys\n"
        "from lightning_memfit.cli.main import main\n"
        f"assert main(['estimate', *{recipe!r}, '--device', '12GiB', '--no-cache', '--json']) == 0\n"
        "folders = ('fitting', 'strategies', 'nvme', 'planner', 'measure', 'bench')\n"
        "prefixes = tuple(f'lightning_memfit.{folder}' for folder in folders)\n"
        "print(sorted(name for name in sys.modules if name.startswith(prefixes)), file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.stderr.splitlines()[-1] == "[]"


@pytest.mark.nightly
def test_micro_batches_that_a_recipe_cuts_are_estimated(capsys, recipe, tmp_path):
    """As those that the loader makes, beside the samples that wait: a plan's file says what the plan has said."""
    init_args = "{micro_batch_size: 2, global_batch_size: 6}"
    callback = f"{{class_path: lightning_memfit.MicroBatching, init_args: {init_args}}}"
    (tmp_path / "cut.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}")
    _, cut = estimate(capsys, *recipe, "--config", str(tmp_path / "cut.yaml"), "--device", "12GiB")
    _, loaded = estimate(capsys, *recipe, "--trainer.accumulate_grad_batches=3", "--device", "12GiB")
    sizes = [(one["micro_batch_size"], one["accumulate_grad_batches"]) for one in (cut, loaded)]
    assert sizes == [(2, 3), (2, 3)]
    waiting = 4 * 2 * 64 * 8  # ids and labels
    for name in ("allocated_bytes", "total_bytes"):
        assert cut["peak"][name] - loaded["peak"][name] == waiting


@DEEPSPEED
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_under_zero_is_traced_with_its_part_of_each_sequence(size):
    """Figures were those of whole sequences."""
    arguments = {"stage": 3, "sequence_parallel_size": size}
    strategy = {"class_path": "lightning_memfit.strategies.ZeroStrategy", "init_args": arguments}
    run = RecipeRun(None, None, None, (), "cpu", strategy, 2, 1, None)
    division, _ = division_of_recipe(run)
    assert not division.traced
    ranks = _ranks(run, division)
    assert (ranks is None) == (size == 1)
    assert size == 1 or ranks.make_strategy().sequence_parallel_size == ranks.world_size == size
