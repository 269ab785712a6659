"""Names of DeepSpeed that swapping to disk needs, written for DeepSpeed 0.19.8; `test_upstream_names.py` pins them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def copy_parameters_from_swap_buffers() -> None:
    """Give a gathered parameter memory of its own, where DeepSpeed hands out the swap buffer it was read to.

    It does so on the CPU with one rank. The buffer is used again once the module has run, but activation checkpointing
    (`use_reentrant=False`) keeps the weights of recomputed operators by their memory until their backward pass, which
    would then use another parameter's numbers: gradients are wrong, silently. Devices and more ranks copy anyway.
    """
    from deepspeed.runtime.zero import partition_parameters

    for handle in (partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle):
        if not hasattr(handle.__init__, "copies_swapped"):
            handle.__init__ = _copying(handle.__init__)


def _copying(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, params: Any) -> None:
        plain(self, params)
        several: list[Any] = [params] if isinstance(params, torch.nn.Parameter) else list(params)
        for parameter in several:
            if parameter.nvme_swapper is not None:
                parameter.data = parameter.data.clone()

    init.copies_swapped = True  # type: ignore[attr-defined]
    return init


def restore_swapped_optimizer(engine: Any, folder: Path, rank: int) -> None:
    """Give an optimizer on disk its states back.

    `DeepSpeedEngine.load_checkpoint` copies the files of moments and master weights, and tells the optimizer nothing of
    them: it would start with no step count and new moments, and nobody would notice but by the losses.

    Args:
        engine: Which has just loaded the checkpoint.
        folder: The checkpoint.
        rank: Of this process.
    """
    tag = (folder / "latest").read_text().strip()
    (file,) = (folder / tag).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]
    zero = engine.optimizer
    for group, was in zip(zero.optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in was.items() if key != "params"})
    for number, sub_group in enumerate(_in_saved_order(zero)):
        if number in saved["state"]:
            _restore_sub_group(zero, sub_group, saved["state"][number])


def _in_saved_order(zero: Any) -> list[int]:
    """Sub-groups by parameter group, as `torch.optim` numbers them in a state dict."""
    return sorted(range(len(zero.fp16_groups)), key=lambda number: zero.sub_group_to_group_id[number])


def _restore_sub_group(zero: Any, sub_group: int, saved: dict[str, Any]) -> None:
    parameter = zero.fp32_partitioned_groups_flat[sub_group]
    numel = int(zero.fp16_partitioned_groups_flat_numel[sub_group])
    swapped = zero._swappable_optimizer_subgroup(sub_group)
    zero.optimizer.state[parameter] = {
        # what lies on disk was saved empty; its size decides that it is looked for there
        name: torch.empty(numel) if swapped and torch.is_tensor(value) and value.dim() and not value.numel() else value
        for name, value in saved.items()
    }
    if swapped:
        info = zero.optimizer_swapper._get_param_swap_info(parameter)  # enters the states by the names of their files
        for tensor in info.tensors[1:]:
            tensor.release_memory()


@contextmanager
def loading_swapped_parameters() -> Iterator[None]:
    """Let stage 3 load a checkpoint while parameters lie on disk and the optimizer doesn't.

    `_rigid_load_state_dict` copies master weights into a flat buffer of each sub-group; those on disk have none, and
    are written instead.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    plain = Stage3._rigid_load_state_dict

    def load(self: Any, state: dict[str, Any], load_optimizer_states: bool = True) -> None:
        if self.swap_optimizer or all(flat is not None for flat in self.fp16_partitioned_groups_flat):
            plain(self, state, load_optimizer_states)
            return
        self.loss_scaler = state["loss_scaler"]
        self.dynamic_loss_scale, self.overflow = state["dynamic_loss_scale"], state["overflow"]
        if load_optimizer_states:
            self._set_fp32_optimizer_param_groups()
            self.optimizer.load_state_dict(state["optimizer_state_dict"])
            self._clear_fp32_optimizer_param_groups()
        for number, saved in enumerate(state["fp32_flat_groups"]):
            self.fp32_partitioned_groups_flat[number].data.copy_(saved.data)
            self._reassign_or_swap_out_partitioned_parameters(number)

    Stage3._rigid_load_state_dict = load
    try:
        yield
    finally:
        Stage3._rigid_load_state_dict = plain
