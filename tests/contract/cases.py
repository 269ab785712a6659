"""How every technique is tried by the contract test: a name without a case here is a failure there."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import lr_scheduler

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.core.facts import Facts, LoaderFacts, Run
from lightning_memfit.techniques.core.registry import find_technique
from lightning_memfit.techniques.core.setting import Setting
from tests.contract.runs import LanguageModel

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

EXACT = 1e-5
"""Relative difference of losses that another order of additions makes over a short run."""


def scheduled(module: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module() -> LanguageModel:
    return LanguageModel(scheduled, **NO_DROPOUT)


@dataclass(frozen=True)
class Case:
    """One setting to try a technique in.

    `tolerance` is the relative difference of the losses that is allowed against the plain run; 0 asks for equal bits,
    None for another optimizer, of which only learning can be asked. `conflicts` are runs that must be refused, each
    with a part of the reason.
    """

    setting: Setting
    tolerance: float | None = 0.0
    conflicts: tuple[tuple[Run, str], ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    cuda_only: bool = False
    """Refused on the CPU; tried by tests that need a device."""

    @property
    def name(self) -> str:
        """Technique under test: the first that was chosen."""
        return self.setting.chosen[-1].name if self.setting.chosen else "micro_batching"


def using(name: str, *others: str, **options: Any) -> Setting:
    """A setting of a technique with options, and of others."""
    setting = Setting().choose(name, **options)
    for other in others:
        setting = setting.choose(other)
    return setting


CPU = Run(Facts(device="cpu", num_blocks=4))
OTHER_OPTIMIZER = replace(CPU, facts=Facts(device="cpu", optimizers=("Muon",)))
DDP = replace(CPU, strategy="DDPStrategy")
MANUAL = replace(CPU, facts=Facts(device="cpu", automatic_optimization=False))
_NOT_EXCHANGED = ((OTHER_OPTIMIZER, "Muon"), (replace(CPU, strategy="DeepSpeedStrategy"), "chooses the optimizer"))
_NOT_CONVERTED = ((OTHER_OPTIMIZER, "Muon"), (replace(CPU, strategy="ModelParallelStrategy"), "can't step"))
_ROUNDING = {"precision": "bf16-true"}
_ROUNDED = ((replace(CPU, **_ROUNDING, strategy="FSDPStrategy"), "FSDPStrategy"),)
_TURING = Facts(capability=(7, 5))

_ADAPTED = (
    (replace(CPU, callbacks=("Lora", "HostMasterWeights")), "Leave HostMasterWeights out"),
    (replace(CPU, callbacks=("Lora",), strategy="FSDPStrategy"), "FSDPStrategy"),
    (replace(CPU, callbacks=("Lora", "Lora")), "two of it"),
)

CASES: dict[str, tuple[Case, ...]] = {
    "lora": (Case(using("lora"), None, _ADAPTED),),
    "qlora": (Case(using("qlora"), None, _ADAPTED), Case(using("qlora", "activation_checkpointing"), None)),
    "lora_8bit": (Case(using("lora_8bit"), None, _ADAPTED),),
    "optimizer_8bit": (Case(using("optimizer_8bit", min_8bit_size=2048), 1e-2, _NOT_CONVERTED),),
    "paged_optimizer": (Case(using("paged_optimizer"), 1e-3, _NOT_CONVERTED),),
    "paged_optimizer_8bit": (
        Case(
            using("paged_optimizer_8bit", min_8bit_size=2048),
            1e-2,
            ((replace(CPU, facts=Facts(optimizers=("SGD",))), "SGD"),),
        ),
    ),
    "fused_adamw": (
        Case(
            using("fused_adamw"),
            EXACT,
            (*_NOT_EXCHANGED, (Run(Facts(gradient_clip_val=1.0), "bf16-mixed"), "refuses to clip")),
        ),
    ),
    "adafactor": (
        Case(using("adafactor"), None, _NOT_EXCHANGED),
        Case(using("adafactor", "gradient_release"), None),
    ),
    "lion": (Case(using("lion"), None, _NOT_EXCHANGED),),
    "lion_8bit": (Case(using("lion_8bit"), None, _NOT_EXCHANGED),),
    "torchao_adamw_4bit": (Case(using("torchao_adamw_4bit"), 5e-2, _NOT_EXCHANGED),),
    "bf16_mixed": (Case(using("bf16_mixed"), 2e-2, ((Run(_TURING), "7.5"),)),),
    "fp16_mixed": (
        Case(
            using("fp16_mixed"),
            1e-2,
            ((CPU, "instead of float16"), (Run(callbacks=("GradientRelease",)), "overflow")),
            cuda_only=True,
        ),
    ),
    "bf16_true": (Case(using("bf16_true"), 5e-2, ((Run(_TURING), "7.5"),)),),
    "bf16_stochastic_rounding": (
        Case(using("bf16_stochastic_rounding", chunk_elements=50_000), 2e-2, _ROUNDED),
        Case(using("bf16_stochastic_rounding", "optimizer_8bit", "gradient_release", "activation_checkpointing"), 2e-2),
        Case(using("bf16_stochastic_rounding"), 2e-2, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    ),
    "host_master_weights": (
        Case(
            using("host_master_weights"),
            2e-2,
            (
                (replace(DDP, precision="bf16-true"), "DDPStrategy"),
                (replace(MANUAL, precision="bf16-true"), "manual optimization"),
                (replace(CPU, **_ROUNDING, callbacks=("Optimizer8bit",)), "Leave Optimizer8bit out"),
                (replace(CPU, **_ROUNDING, callbacks=("GradientRelease",)), "Leave GradientRelease out"),
            ),
        ),
        Case(using("host_master_weights"), 2e-2, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
    ),
    "gradient_release": (
        Case(
            using("gradient_release"),
            0.0,
            (
                (replace(CPU, accumulate_grad_batches=2), "accumulate_grad_batches=2"),
                (replace(CPU, facts=Facts(gradient_clip_val=1.0)), "by norm"),
                (DDP, "DDPStrategy"),
                (replace(CPU, precision="16-mixed"), "loss scaling"),
                (MANUAL, "manual optimization"),
                (
                    replace(CPU, facts=Facts(gradient_hooks=(("optimizer_step", "the module's `optimizer_step`"),))),
                    "`optimizer_step`",
                ),
                (replace(CPU, facts=Facts(optimizers=("AdamW", "SGD"))), "has 2"),
            ),
        ),
        Case(using("gradient_release", "optimizer_8bit"), 1e-2),
    ),
    "zero_grad_after_step": (
        Case(
            using("zero_grad_after_step"),
            0.0,
            (
                (MANUAL, "manual optimization"),
                (replace(CPU, strategy="DeepSpeedStrategy"), "DeepSpeed keeps gradients"),
                (replace(CPU, callbacks=("GradientRelease",)), "it frees gradients earlier. Leave GradientRelease out"),
                (replace(CPU, facts=Facts(gradient_hooks=(("optimizer_zero_grad", ""),))), "`optimizer_zero_grad`"),
            ),
            trainer={"gradient_clip_val": 1.0},
        ),
        Case(using("zero_grad_after_step", "optimizer_8bit", "activation_checkpointing"), 1e-2),
    ),
    "chunked_loss": (
        Case(using("chunked_loss", num_chunks=7), EXACT, ((Run(Facts(causal_lm=False)), "causal language model"),)),
    ),
    "tiled_mlp": (
        Case(
            using("tiled_mlp", num_tiles=3),
            EXACT,
            ((Run(Facts(mlp_width=0)), "Name its feed-forward layers"),),
        ),
        Case(using("tiled_mlp", "activation_checkpointing", num_tiles=3), EXACT),
    ),
    "activation_checkpointing": (
        Case(
            using("activation_checkpointing"),
            0.0,
            ((Run(Facts(num_blocks=0)), "no repeated blocks"),),
        ),
        Case(using("activation_checkpointing", mode="every", every=2)),
        Case(using("activation_checkpointing", mode="selective", keep=["matmul", "attention"])),
        Case(using("activation_checkpointing", mode="offload"), cuda_only=True),
        Case(using("activation_checkpointing", choices=["none", "full", "keep_matmul", "none"])),
    ),
    "attention_kernel": (
        Case(using("attention_kernel"), 0.0, ((Run(Facts(hugging_face=False)), "no Hugging Face model"),)),
        Case(using("attention_kernel", implementation="eager"), EXACT),
    ),
    "torch_compile": (
        Case(
            using("torch_compile"),
            EXACT,
            (
                (Run(Facts(compiler=False)), "Triton"),
                (Run(Facts(device="cpu", compiler=False)), "C++"),
                (Run(Facts(num_blocks=0)), "`blocks`"),
                (replace(CPU, callbacks=("MemoryLimit",)), "simulated device"),
                (Run(strategy="DeepSpeedStrategy"), "DeepSpeedStrategy"),
            ),
        ),
    ),
    "tf32": (
        Case(
            using("tf32"),
            1e-2,
            (
                (CPU, "CUDA devices only"),
                (Run(_TURING), "7.5"),
                (Run(Facts(capability=(9, 0)), "bf16-true"), "no matrix"),
            ),
            cuda_only=True,
        ),
    ),
    "data_loading": (
        Case(using("data_loading"), 0.0, ((Run(Facts(loaders=(LoaderFacts("Stream", settable=False),))), "Stream"),)),
    ),
    "micro_batching": (
        Case(
            using("micro_batching", micro_batch_size=1),
            EXACT,
            ((MANUAL, "manual optimization"),),
        ),
    ),
}


def all_cases() -> list[tuple[str, int, Case]]:
    """Name, number and case, in the registry's order."""
    return [(name, number, case) for name, cases in CASES.items() for number, case in enumerate(cases)]


def can_run(name: str, case: Case) -> str | None:
    """Why a case can't be run here, or None."""
    missing = next((reason for c in case.setting.chosen if (reason := find_technique(c.name).missing())), None)
    if missing is not None:
        return f"{name} {missing}"
    if case.cuda_only and not torch.cuda.is_available():
        return "needs a CUDA device"
    return None
