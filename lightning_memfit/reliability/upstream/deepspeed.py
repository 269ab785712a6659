"""Everything that fitting does to a DeepSpeed engine by names that are not public. Written for DeepSpeed 0.19.8."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn


def engine_of(trainer: Trainer) -> "ZeroEngine | None":
    """Return the engine of a ZeRO strategy, once it is set up for training; None under others."""
    strategy = trainer.strategy
    return ZeroEngine(strategy.deepspeed_engine) if isinstance(strategy, DeepSpeedStrategy) else None


def shards_weights(trainer: Trainer) -> bool:
    """Whether the ranks of a run communicate in forward: with stage 3."""
    return isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3


def held_weight(parameter: nn.Parameter) -> Tensor:
    """Return what this rank holds of a parameter while nothing runs: with stage 3 its shard."""
    held: Tensor = getattr(parameter, "ds_tensor", parameter)
    return held


class ZeroEngine:
    """A DeepSpeed engine with a ZeRO optimizer.

    Its gradients are accumulated and divided out of reach of `Parameter.grad`, and its weights are copies, in the
    precision of forward, of what the optimizer steps.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer

    @property
    def is_on_disk(self) -> bool:
        """Whether optimizer states or weights are on disk."""
        return any(getattr(self._zero, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu"))

    @property
    def left_out_step(self) -> bool:
        """Whether the last step was left out on all ranks, as gradients were not finite."""
        return bool(self._zero.overflow)

    def leave_out_non_finite_steps(self) -> None:
        """Look at all gradients before a step; by itself DeepSpeed 0.19 doesn't in float32, except with stage 3."""
        if hasattr(self._zero, "check_grad_overflow"):
            self._zero.check_grad_overflow = True

    def settle(self) -> None:
        """Divide weights that are left gathered, so that `held_weight` is what the next forward uses."""
        if hasattr(self._zero, "_partition_all_parameters"):
            self._zero._partition_all_parameters()

    def discard_gradients(self) -> None:
        """Forget what has been accumulated since the last step, as DeepSpeed does after an overflow."""
        zero = self._zero
        norm = zero._global_grad_norm if hasattr(zero, "_global_grad_norm") else None

        def overflow(*_: Any, **__: Any) -> bool:
            zero.overflow = True
            return True

        temporary = {
            "check_grad_overflow": True,
            "check_overflow": overflow,
            "_overflow_check_and_loss_scale_update": overflow,
            "_update_scale": lambda *_: None,
        }
        before = {name: vars(zero)[name] for name in temporary if name in vars(zero)}
        vars(zero).update(temporary)
        try:
            zero.step()
        finally:
            for name in temporary:
                vars(zero).pop(name)
            vars(zero).update(before)
            for accumulated in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
                accumulated.update(dict.fromkeys(accumulated))  # after an overflow there is no window's beginning
        zero.overflow, zero._global_grad_norm = False, norm
