"""What `Setting.validate` says of a setting is what its run says, in the same words, and nothing else is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.core.callback import Refusal, ReversibleCallback, TechniqueCallback
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import CallbackSpec, Technique
from lightning_memfit.techniques.gradient_release import GradientRelease
from tests.contract.runs import LanguageModel, loader
from tests.helpers.trainers import quiet_trainer


class Plain(pl.LightningModule):
    """No repeated blocks, and nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.second(self.first(batch[0]).relu()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class OwnBackward(Plain):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Clears(pl.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([[torch.zeros(8)]])


class Late(LanguageModel):
    """Builds its model in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(late=True)


def rows(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4, **options)


@dataclass
class Situation:
    """A module and its Trainer."""

    module: Callable[[], pl.LightningModule] = LanguageModel
    data: Callable[[], Any] = loader
    trainer: dict[str, Any] = field(default_factory=dict)
    others: Callable[[], list[pl.Callback]] = list

    def facts(self) -> Facts:
        module = self.module()
        module.configure_model()
        return read_facts(module, "cpu", loader=self.data(), callbacks=self.others(), **self.trainer)


SITUATIONS = {
    "language model": Situation(),
    "built late": Situation(Late),
    "clipped by norm": Situation(trainer={"gradient_clip_val": 1.0}),
    "clipped by value": Situation(trainer={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
    "memory limit": Situation(others=lambda: [MemoryLimit("1GiB")]),
    "no blocks": Situation(Plain, rows),
    "manual optimization": Situation(Manual, rows),
    "hook": Situation(Hooked, rows),
    "own backward": Situation(OwnBackward, rows),
    "callback before clearing": Situation(Plain, rows, others=lambda: [Clears()]),
    "stream": Situation(Plain, lambda: DataLoader(Stream(), batch_size=None)),
    "no loader of torch": Situation(Plain, lambda: [[torch.zeros(4, 8)]]),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "activation_checkpointing": [{}, {"mode": "offload"}, {"budget": "auto"}],
    "attention_kernel": [
        {},
        {"implementation": "flash_attention_2"},
        {"implementation": "kernels-community/flash-attn"},
    ],
    "data_loading": [{}, {"num_workers": 0}],
    "micro_batching": [{"micro_batch_size": 1}],
}


def settings() -> list[Setting]:
    chosen = [Setting().choose(t.name, **options) for t in TECHNIQUES for options in OPTIONS.get(t.name, [{}])]
    pairs = (
        ("gradient_release", "fp16_mixed"),
        ("gradient_release", "bf16_stochastic_rounding"),
        ("gradient_release", "host_master_weights"),
        ("gradient_release", "zero_grad_after_step"),
        ("gradient_release", "micro_batching"),
        ("gradient_release", "torchao_adamw_4bit"),
        ("lora", "host_master_weights"),
        ("optimizer_8bit", "host_master_weights"),
        ("fused_adamw", "bf16_mixed"),
        ("fused_adamw", "bf16_true"),
    )
    return chosen + [Setting().choose(first).choose(second) for first, second in pairs]


class Stop(pl.Callback):
    """Ends a run once every callback is set up, or the model is built."""

    class Reached(Exception):
        pass

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise self.Reached


def refusal_of(setting: Setting, situation: Situation) -> Exception | None:
    """How a run with a setting is refused before it begins."""
    others = situation.others()
    options = {**situation.trainer, "precision": setting.precision, "max_steps": 1}
    trainer = quiet_trainer(*others, *setting.callbacks(), Stop(), **options)
    try:
        trainer.fit(situation.module(), situation.data())
    except Stop.Reached:
        return None
    except Exception as error:
        return error
    raise AssertionError("the run was to be stopped")


@pytest.fixture(scope="module")
def known() -> dict[str, Facts]:
    return {name: situation.facts() for name, situation in SITUATIONS.items()}


@pytest.mark.nightly_cases("clipped", "own generator", "stream", "no loader", "own backward")
@pytest.mark.nightly_cases("memory limit", "built late", "clipped by value")
@pytest.mark.parametrize("name", SITUATIONS)
def test_validate_says_what_the_run_says(name: str, known: dict[str, Facts]) -> None:
    """But of Lightning's own precisions, of which it warns where it computes in another."""
    for setting in settings():
        if any(choice.technique.missing() or not choice.technique.callbacks for choice in setting.chosen):
            continue
        label = f"{[(choice.name, dict(choice.options)) for choice in setting.chosen]}"
        said, error = setting.validate(known[name]), refusal_of(setting, SITUATIONS[name])
        if error is None:
            assert not said, label
        else:
            assert any(reason.partition(": ")[2] in str(error) for reason in said), (label, str(error), said)


def test_every_rule_of_a_record_is_the_one_of_its_callbacks() -> None:
    for technique in TECHNIQUES:
        assert technique.callbacks or technique.page == "mixed_precision", technique.name
        for spec in technique.callbacks:
            cls = spec.load()
            if issubclass(cls, ReversibleCallback):
                rule = __import__(cls.__module__, fromlist=["unsupported"]).unsupported
                run = Setting().choose(technique.name).run(Facts(device="cpu"))
                reason = rule(run, spec.arguments)
                assert cls.refusal(run, spec.arguments) == reason, cls
                assert reason is None or technique.missing() or technique.refusal(run, {}) is not None, cls


class Momentum(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("name", ["fused_adamw", "adafactor", "lion"])
def test_hyper_parameters_without_a_counterpart(name: str) -> None:
    setting = Setting().choose(name)
    if any(choice.technique.missing() for choice in setting.chosen):
        pytest.skip("needs a package")
    (said,) = setting.validate(read_facts(Momentum(), "cpu", optimizer=Momentum().configure_optimizers()))
    assert "`momentum=0.9`" in said
    with pytest.raises(ValueError, match="momentum") as caught:
        quiet_trainer(*setting.callbacks(), max_steps=1).fit(Momentum(), rows())
    assert str(caught.value) == said.partition(": ")[2]


def test_another_optimizer_is_no_kernel_of_the_modules_own() -> None:
    plain = torch.optim.SGD(Plain().parameters(), lr=1e-2)
    (said,) = Setting().choose("fused_adamw").validate(read_facts(Plain(), "cpu", optimizer=plain))
    assert "SGD would become torch.AdamW" in said
    adam = torch.optim.AdamW(Plain().parameters())
    assert Setting().choose("fused_adamw").validate(read_facts(Plain(), "cpu", optimizer=adam)) == []


def test_a_subclass_has_the_rule_of_its_base() -> None:
    cls = type("Mine", (GradientRelease,), {"__module__": "torch"})
    run = Setting().run(Facts("cpu", automatic_optimization=False))
    assert "automatic optimization" in str(cls.refusal(run, {}))


def test_no_technique_can_forget_its_rule() -> None:
    """A callback that only has `apply`, and a rule beside it, is refused by the rule."""

    class Forgetful(TechniqueCallback):
        def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise AssertionError("the rule comes first")

    with pytest.raises(Refusal, match="Forgetful: not with a precision of 32-true"):
        quiet_trainer(Forgetful(), max_steps=1).fit(Plain(), rows())


def unsupported(run: Any, options: Any) -> str | None:
    """The rule of `Forgetful`."""
    return f"not with a precision of {run.precision}"


def test_the_rules_of_callbacks_count_for_their_record() -> None:
    path = f"{__name__}.Ruled"
    technique = Technique("ruled", "loss", "", frozenset({"exact"}), (CallbackSpec(path, {"width": 3}),))
    run = Setting().run(Facts())
    assert technique.refusal(run, {}) == "a width of 3"
    assert technique.refusal(run, {"width": 4}) == "a width of 4"


class Ruled(TechniqueCallback):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width

    @classmethod
    def refusal(cls, run: Any, options: Any) -> str | None:
        return f"a width of {options['width']}"

    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


def test_a_trace_for_another_device_is_not_refused() -> None:
    """What is predicted for CUDA is traced on the CPU, where offloading is refused."""
    from lightning_memfit.profile.build import profile_module
    from lightning_memfit.profile.trace import Emulation

    callbacks = (ActivationCheckpointing(mode="offload"),)
    batch = next(iter(loader()))
    assert profile_module(LanguageModel(), batch, emulation=Emulation("cuda", (8, 0)), callbacks=callbacks).events
    with pytest.raises(Refusal, match="host memory already"):
        quiet_trainer(*callbacks, max_steps=1).fit(LanguageModel(), loader())
