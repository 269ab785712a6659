"""Strategies as records: where weights, gradients and optimizer states are kept, on one device or many.

A strategy has no callback and is not traced: what it divides and moves is arithmetic (`Sharding`). The options
`devices` and `num_nodes` come from the setting; `cost` also reads its precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_memfit.techniques.core.cost import Cost
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import Options, Technique, supported

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_MODULE = "lightning_memfit.strategies"
_LIGHTNING = {0: "DDPStrategy", 3: "ModelParallelStrategy"}
"""Lightning's base class of torch's strategies, by what they divide."""
_FSDP2_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


def _needs_no_scaling(run: Run, options: Options) -> str | None:
    if run.precision not in _FSDP2_PRECISIONS:
        return f"`precision={run.precision!r}`: FSDP2 under Lightning takes {', '.join(_FSDP2_PRECISIONS)}."
    return None


def _deepspeed(run: Run, options: Options) -> str | None:
    """What DeepSpeed, or Lightning with DeepSpeed, refuses."""
    facts = run.facts
    if facts.device == "cpu" and run.precision.startswith("16"):
        return f"`precision={run.precision}`: DeepSpeed has no float16 on the CPU. Use bf16-mixed."
    if facts.gradient_clip_val and facts.gradient_clip_algorithm == "value":
        return "DeepSpeed clips gradients by their norm only. Set gradient_clip_algorithm='norm'."
    if len(facts.optimizers) > 1:
        return f"DeepSpeed steps one optimizer, and the module has {len(facts.optimizers)}. Use DDP or FSDP2."
    return None


def _offloaded(run: Run, options: Options) -> str | None:
    if run.facts.device == "cpu":
        return "on the CPU device and host memory are one, so that nothing is saved. Use ZeRO without offloading."
    if run.has("Optimizer8bit"):
        return "8-bit states save memory of the device, and here they are on the host, where 8 bits are slow."
    return _deepspeed(run, options)


def _on_disk(run: Run, options: Options) -> str | None:
    if run.has("Optimizer8bit"):
        return (
            "DeepSpeed swaps fp32 tensors only, and 8-bit states would be lost silently. Use an optimizer of "
            "torch.optim."
        )
    return _deepspeed(run, options)


def strategy_record(
    name: str,
    summary: str,
    class_name: str,
    sharding: Sharding,
    rule: Callable[[Run, Options], str | None],
    **init_args: Any,
) -> Technique:
    """The record of a strategy."""

    def cost(profile: ModelProfile, options: Options) -> Cost:
        ranks = int(options.get("devices", 1)) * int(options.get("num_nodes", 1))
        return sharding.cost(profile, ranks, str(options.get("precision", "32-true")))

    lightning = "DeepSpeedStrategy" if sharding.deepspeed else _LIGHTNING[sharding.stage]
    spec: dict[str, Any] = {"class_path": f"{_MODULE}.{class_name}"}
    if init_args:
        spec["init_args"] = init_args
    return Technique(
        name=name,
        kind="strategy",
        summary=summary,
        numerics=frozenset({"exact"}),
        trainer={"strategy": spec, "devices": 1, "num_nodes": 1},
        unsupported=rule,
        cost=cost,
        package="deepspeed" if sharding.deepspeed else "",
        traced=False,
        sharding=sharding,
        lightning_strategy=lightning,
    )


def _zero(name: str, summary: str, sharding: Sharding) -> Technique:
    offloaded = {"offload_optimizer": sharding.optimizer != "none", "offload_parameters": sharding.parameters != "none"}
    arguments: dict[str, Any] = {key: True for key, value in offloaded.items() if value}
    if arguments:
        arguments["pin_memory"] = True
    rule = _offloaded if sharding.offloads else _deepspeed
    return strategy_record(name, summary, "ZeroStrategy", sharding, rule, stage=sharding.stage, **arguments)


def _infinity(name: str, summary: str, parameters: bool) -> Technique:
    sharding = Sharding(3, True, "nvme", "nvme" if parameters else "none")
    arguments = {"nvme_path": None, "offload_optimizer": True, "offload_parameters": parameters}
    return strategy_record(name, summary, "ZeroInfinityStrategy", sharding, _on_disk, **arguments)


STRATEGIES: tuple[Technique, ...] = (
    strategy_record("ddp", "a whole copy of the model on every device", "DataParallelStrategy", Sharding(0), supported),
    strategy_record(
        "fsdp2",
        "weights, gradients and states divided among devices, blocks gathered while they compute",
        "FullyShardedStrategy",
        Sharding(3),
        _needs_no_scaling,
    ),
    _zero("zero_1", "DeepSpeed: optimizer states divided among devices", Sharding(1, True)),
    _zero("zero_2", "DeepSpeed: optimizer states and gradients divided", Sharding(2, True)),
    _zero("zero_3", "DeepSpeed: optimizer states, gradients and weights divided", Sharding(3, True)),
    _zero("zero_offload", "ZeRO-2 with optimizer states and step on the host", Sharding(2, True, "cpu")),
    _zero("zero_3_offload_optimizer", "ZeRO-3 with optimizer states and step on the host", Sharding(3, True, "cpu")),
    _zero("zero_3_offload", "ZeRO-3 with states, step and weights on the host", Sharding(3, True, "cpu", "cpu")),
    _infinity("zero_infinity_optimizer", "ZeRO-3 with optimizer states and gradients on disk", parameters=False),
    _infinity("zero_infinity", "ZeRO-3 with optimizer states, gradients and weights on disk", parameters=True),
)
"""Torch's own strategies first, then DeepSpeed's, from the device to the disk."""

KNOWN = {technique.name: technique for technique in STRATEGIES}
"""Those of this process by name, as `core.registry.register` adds to them."""
