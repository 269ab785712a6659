"""What a recipe itself chooses, as a setting to compare plans with."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cli import estimate_recipe, plan_recipe
from cli.estimate_recipe import target_of
from cli.main import main
from cli.recipe_run import RecipeRun, device_numbers, load_recipe
from lightning_memfit import CausalLM, MicroBatching
from lightning_memfit.adapters.lora import adapter_parameters
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.plan import own_adapter
from lightning_memfit.planner.workload import parse_device_count
from lightning_memfit.profile.build import resize_batch
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from lightning_memfit.techniques.quantized_weights import QuantizedWeights

REQUEST = plan_recipe.PlanRequest((), host_bytes=64 << 30)


def recipe(strategy: Any = "auto", devices: int | None = 1, precision: Any = "bf16-mixed") -> RecipeRun:
    batch, options = {"x": torch.zeros(4, 2)}, StepOptions(precision, 2)
    made: Any = SimpleNamespace
    return RecipeRun(made(), batch, options, (Optimizer8bit(),), "auto", strategy, devices, 1, (made(), made()))


def sharded(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "lightning_memfit.strategies.FullyShardedStrategy", "init_args": arguments}


@pytest.mark.parametrize(
    ("accumulate", "counted"),
    [
        (2, {}),  # as in the recipe
        (4, {"limit_train_batches": 200, "limit_val_batches": 6, "val_check_interval": 50}),
        (1, {"limit_train_batches": 50, "limit_val_batches": 2, "val_check_interval": 12}),
    ],
)
def test_as_many_samples_are_trained_and_validated_in_batches_of_another_size(
    accumulate: int, counted: dict[str, int]
) -> None:
    numbers = {"limit_train_batches": 100, "limit_val_batches": 3, "val_check_interval": 25, "overfit_batches": 0}
    run = recipe()
    run.__dict__["config"] = {"trainer": {**numbers, "limit_test_batches": 7, "max_steps": 5}}
    found = plan_recipe._counted_in_batches(run, accumulate)
    notes = list(plan_recipe._said_of_counts(run, {"accumulate_grad_batches": accumulate, **found}))
    assert found == counted
    assert len(notes) == bool(counted)
    said = [f"`trainer.{name}` {numbers[name]} -> {value}" for name, value in counted.items()]
    assert all(change in notes[0] for change in said)
    run.__dict__["config"] = {"trainer": dict.fromkeys(numbers, 1.0)}  # shares of an epoch
    assert plan_recipe._counted_in_batches(run, accumulate) == {}
    assert list(plan_recipe._said_of_counts(run, {})) == []


@pytest.mark.parametrize(
    ("said", "number", "laid"),
    [
        ([1], 1, [1]),  # it was 1, which is the first
        ([2, 3], 2, [2, 3]),
        ("2,3", 1, [2]),
        ("1,", 1, [1]),
        ([1], 4, 4),  # `--device "4x A100"`
        (2, 2, 2),
        ("auto", 8, 8),
        (-1, 1, 1),
    ],
)
def test_devices_that_a_recipe_names_by_their_numbers_stay(said: Any, number: int, laid: Any) -> None:
    """A plan made for what is free on the second card ran on the first one."""
    run = replace(recipe(), device_numbers=device_numbers(said))
    run.__dict__["config"] = {"trainer": {"devices": said}}
    assert plan_recipe._devices_as_named(run, number) == laid


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strategy": "no_such_strategy", "devices": 2}, "no_such_strategy"),
        ({"strategy": {"class_path": "no_such_module.Strategy"}}, "no_such_module"),
        ({"strategy": {"class_path": "lightning.pytorch.strategies.NoSuchStrategy"}}, "NoSuchStrategy"),
        ({"precision": "16-true"}, "16-true"),
        ({"strategy": sharded(tensor_parallel_size=2), "devices": 2}, "shards over all ranks"),
        ({"strategy": sharded(sharding_size=2), "devices": 4}, "shards over all ranks"),
    ],
)
def test_what_no_record_describes_gives_the_reason(changed: dict[str, Any], message: str) -> None:
    setting, reason = plan_recipe.own_setting(recipe(**changed), 1)
    assert setting is None
    assert message in reason


SMALL = ("--model.config.n_layer=1", "--model.config.n_embd=32", "--model.config.n_head=2")


@pytest.mark.parametrize(
    ("config", "device", "changed", "expected"),
    [
        # 4 x 8 on two devices that compute on one batch together
        ("gpt2large_tensor_parallel", "2x A100 80GB", (), (32, 2, 1)),
        # 4 x 8 on eight of each of two machines
        ("gpt2xl_fsdp2", "16x A100 80GB", ("--trainer.devices=auto", "--trainer.num_nodes=2"), (512, 8, 2)),
        # other devices than the recipe's: its samples on them
        ("gpt2xl_fsdp2", "2x A100 80GB", ("--trainer.devices=8",), (256, 2, 1)),
    ],
)
def test_a_plan_keeps_the_samples_of_a_step(
    config: str, device: str, changed: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    with load_recipe(["--config", config, *SMALL, *changed]) as run:
        count, name = parse_device_count(device)
        request = plan_recipe.PlanRequest((), name, count, host_bytes=64 << 30)
        workload = plan_recipe.workload_of(run, target_of(name, run), request)
    devices = workload.devices
    assert (workload.samples_per_step, devices.per_machine, devices.machines) == expected


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ("2,0", (2, 0)),
        ("2", (0, 1)),
        (-1, None),
    ],
)
def test_estimates_and_plans_take_the_devices_and_limits_of_the_recipe(
    devices: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(estimate_recipe, "live_target", lambda *given: asked.append(given) or named_target("12GiB"))
    limited = (MemoryLimit("4GiB"), Optimizer8bit())
    run = replace(recipe(), callbacks=limited, device_numbers=device_numbers(devices))
    target_of(None, run)
    assert asked == [(wanted, [4 << 30])]


def test_a_named_cpu_is_under_the_limit_of_the_recipe() -> None:
    target = target_of("cpu", replace(recipe(), callbacks=(MemoryLimit("4GiB"),)))
    assert (target.capacity_bytes, target.counts_tensors) == (4 << 30, True)
    assert not target_of("cpu", recipe()).counts_tensors


@pytest.mark.parametrize(("config", "adapter"), [("chat_lora", "lora"), ("chat_qlora", "qlora")])
def test_adapters_of_a_recipe_are_kept_as_they_are(config: str, adapter: str) -> None:
    with load_recipe(["--config", config, "--config", "quick/chat"]) as run:
        target = target_of("12GiB", run)
        workload = plan_recipe.workload_of(run, target, REQUEST)
        own = next(one for one in run.callbacks if type(one).__name__ == "Lora")
        assert workload.adapter is not None
        assert (workload.adapter.name, workload.adapter.options["rank"]) == (adapter, own.rank)
        allowed = replace(REQUEST, allow=frozenset({"exact", "lora"}))
        assert plan_recipe.workload_of(run, target, allowed).adapter is None  # then a plan chooses them


class Normalised(pl.LightningModule):
    """Takes statistics over its batches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = (
            torch.nn.Conv2d(3, width, 3),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, 1, 30),
        )
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.Tensor(self.layers(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(pl.LightningDataModule):
    """Noise."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(list(torch.zeros(16, 3, 32, 32)), batch_size=self.batch_size)


@pytest.mark.nightly
@pytest.mark.nightly_cases("batching1-True", "None-True")
@pytest.mark.parametrize(("batching", "is_kept"), [(None, True), ({}, True), ({"allow_batch_statistics": True}, False)])
def test_layers_that_take_statistics_over_a_micro_batch_keep_its_size(
    batching: dict[str, Any] | None, is_kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of 2 samples are not those of 8, and every file of a plan said that it changes nothing."""
    callbacks = [] if batching is None else [{"class_path": "lightning_memfit.MicroBatching", "init_args": batching}]
    sections = {
        "model": {"class_path": f"{__name__}.Normalised"},
        "data": {"class_path": f"{__name__}.Images"},
        "trainer": {"accelerator": "cpu", "callbacks": callbacks, "logger": False},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(sections))
    options = ["--config", str(file), "--allow", "exact", "--device", "cpu", "--json"]
    codes, plans = [], []
    for memory in ("1GiB", "131MiB"):  # of which 128 MiB are a margin; a step of 8 samples needs 3.8
        codes += [main(["plan", *options, "--host-memory", memory])]
        plans += [json.loads(capsys.readouterr().out)]
    large, small = plans
    assert large["setting"]["micro_batch_size"] == 8
    assert any("Micro-batches stay as large" in note for note in large["notes"]) == is_kept
    assert codes == ([0, 1] if is_kept else [0, 0])
    assert any("Smaller micro-batches are not planned" in line for line in small["advice"]) == is_kept


class BesideReference(CausalLM):
    """Compares the model with itself without its adapters, and refuses a step that has none."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if not list(adapter_parameters(self)):
            raise MisconfigurationException("The reference is the model without its adapters, and there are none.")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def no_step_without_adapters(tmp_path: Path) -> list[str]:
    module = {"model": {"class_path": f"{__name__}.BesideReference"}}
    (tmp_path / "module.yaml").write_text(yaml.safe_dump(module))
    recipes = ["chat_lora", "quick/chat", str(tmp_path / "module.yaml")]
    named = [word for name in recipes for word in ("--config", name)]
    return ["plan", *named, "--device", "12GiB", "--host-memory", "8GiB", "--allow"]


@pytest.mark.nightly
def test_a_step_that_has_no_meaning_without_adapters_is_planned_with_them(
    no_step_without_adapters: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*no_step_without_adapters, "exact", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["setting"]["techniques"]["lora"] == {"rank": 16, "alpha": 32.0}
    assert "lora" not in [effect["technique"] for effect in plan["bought"]]
    assert not any("adapters" in words for words in plan["changes"])


def test_adapters_on_some_of_the_quantized_layers_are_kept() -> None:
    kept = own_adapter([QuantizedWeights(8), Lora(4, target_modules=["q_proj"])], "bf16-mixed")
    assert kept is not None
    assert (kept.name, kept.options) == ("lora_8bit", {"rank": 4, "target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match="has QuantizedWeights, and no plan can keep it: plans give it other arg"):
        own_adapter([QuantizedWeights(target_modules=["up_proj"]), Lora()], "bf16-mixed")


@pytest.mark.parametrize("arguments", [{"train": ["score"]}, {"alpha": 32, "target_modules": ("q_proj", "h.1.v_proj")}])
def test_arguments_of_adapters_are_kept_whatever_kind_of_list_they_are_in(arguments: dict[str, Any]) -> None:
    kept = own_adapter([Lora(**arguments)], "bf16-mixed")
    assert kept is not None
    assert kept.options == {name: list(v) if isinstance(v, tuple) else v for name, v in arguments.items()}


def test_a_plan_is_for_the_batch_that_micro_batching_gives_a_step_with_its_arguments() -> None:
    own = MicroBatching(global_batch_size=64, loss_weight=len, last_resort="recompute")
    written = {"global_batch_size": 64, "micro_batch_size": "auto", "loss_weight": "builtins.len", "recover": True}
    path = "lightning_memfit.fitting.step.callback.MicroBatching"
    config = {"trainer": {"callbacks": [{"class_path": path, "init_args": written | {"last_resort": "recompute"}}]}}
    parser: Any = SimpleNamespace(dump=lambda *_, **__: yaml.safe_dump(config))
    run = replace(recipe(), callbacks=(own,), parsed=(parser, Namespace()))
    setting, _ = plan_recipe.own_setting(run, 1)
    assert setting is not None
    assert (setting.micro_batch_size, setting.accumulate_grad_batches) == (32, 2)
    assert plan_recipe._batching(run) == {
        "global_batch_size": 64,
        "loss_weight": "builtins.len",
        "last_resort": "recompute",
    }
    assert plan_recipe._batching(recipe()) is None
    cut = MicroBatching(micro_batch_size=8, global_batch_size=40)
    setting, _ = plan_recipe.own_setting(replace(run, callbacks=(cut,)), 1)
    assert setting is not None
    assert (setting.micro_batch_size, setting.accumulate_grad_batches) == (8, 2 * 3)


def test_batches_whose_rows_are_not_their_samples_stay_as_they_are() -> None:
    """Packed sequences, say: a `batch_size` that was made of their rows would train other samples in a step."""
    with load_recipe(["--config", "gpt2xl_fsdp2", *SMALL, "--trainer.devices=1"]) as run:
        run = replace(run, batch=resize_batch(run.batch, 4, 1))
        target = target_of("A100 80GB", run)
        workload = plan_recipe.workload_of(run, target, REQUEST)
        assert (workload.loader_batch, workload.samples_per_step, workload.strategies) == (1, 1 * 8, False)
        told = "`data.batch_size=4`, and a batch has 1 rows"
        with pytest.raises(ValueError, match=f"{told}.* with 2 devices"):
            plan_recipe.workload_of(replace(run, devices=2), target, REQUEST)
        shaped = plan_recipe._of_own_size(run)  # whose rows were given, for shapes alone
        assert "`--batch-shape` has 1 rows and `data.batch_size` is 4" in shaped.notes[-1]
        workload = plan_recipe.workload_of(shaped, target, REQUEST)
        assert (workload.loader_batch, workload.samples_per_step, workload.strategies) == (None, 4 * 8, True)
