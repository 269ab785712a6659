"""Everything that the strategies change or read in DeepSpeed by names that are not public.

Written for DeepSpeed 0.19.8; `test_upstream_names.py` and `test_zero_infinity.py` fail if these names move.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def disable_shared_memory_collectives() -> None:
    """Make gloo do all collectives on the CPU.

    DeepSpeed spends a minute compiling its shared-memory collectives at first use, and they assume that all ranks are
    on one machine.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def allow_loading_without_optimizer() -> None:
    """Let an engine without optimizer load a stage-3 checkpoint.

    `DeepSpeedEngine.load_checkpoint` ends by calling a method that only the optimizer's side of stage 3 has; with
    nothing but parameters, which are loaded by then, there is nothing left to do.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    if not hasattr(DeepSpeedZeRoOffload, "_restore_from_bit16_weights"):
        DeepSpeedZeRoOffload._restore_from_bit16_weights = lambda self: None


def broadcast_scalars() -> None:
    """Let parameters without dimensions be broadcast.

    DeepSpeed broadcasts the bytes of every parameter, as `data.view(torch.uint8)`, which torch has only for tensors
    with a dimension. So they get one for as long as that takes; stage 3 has noted their shape by then.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    if hasattr(DeepSpeedEngine._broadcast_model, "takes_scalars"):
        return
    broadcast, note, leave = (
        DeepSpeedEngine._broadcast_model,
        Init._convert_to_deepspeed_param,
        GatheredParameters.__exit__,
    )

    def broadcast_model(self: Any) -> None:
        scalars = [p for p in self.module.parameters() if not p.dim()]
        _reshape(scalars, (1,))
        try:
            broadcast(self)
        finally:
            _reshape(scalars, ())

    def convert(self: Any, param: Any) -> None:
        note(self, param)
        _reshape([param] if not param.dim() else [], (1,))  # it is partitioned next

    def exit_gathered(self: Any, *error: Any) -> None:
        scalars = [p for p in self.params if not p.dim()] if self.enabled else []
        _reshape(scalars, (1,))
        leave(self, *error)
        _reshape([p for p in scalars if p.numel()], ())  # those that were not partitioned

    broadcast_model.takes_scalars = True  # type: ignore[attr-defined]
    DeepSpeedEngine._broadcast_model = broadcast_model
    Init._convert_to_deepspeed_param = convert
    GatheredParameters.__exit__ = exit_gathered


def _reshape(parameters: Sequence[torch.nn.Parameter], shape: tuple[int, ...]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.reshape(shape)


def keep_adagrad() -> None:
    """Let stages step with the user's own Adagrad, whose groups may differ and whose learning rates a schedule sets.

    Its states are made by its constructor, so that DeepSpeed constructs another one for the partitions: with the
    options of the first group only, out of reach of schedules, and wrong for several groups. Its states are right.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for stage in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        if not hasattr(stage.initialize_optimizer_states, "keeps_adagrad"):
            stage.initialize_optimizer_states = _keeping_optimizer(stage.initialize_optimizer_states)


def _keeping_optimizer(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def initialize(self: Any) -> None:
        own = self.optimizer
        plain(self)
        if self.optimizer is own:
            return
        own.state.clear()  # those of the parameters, which it doesn't step
        own.state.update(self.optimizer.state)
        self.optimizer = own

    initialize.keeps_adagrad = True  # type: ignore[attr-defined]
    return initialize


@contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """Make an engine load the universal checkpoint of a folder; otherwise the option must be known when it starts."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


# --- states on disk -------------------------------------------------------------------------------------------------


SUB_GROUPS = "memfit_sub_groups"
"""Key of `sub_groups_of` in a checkpoint."""

_ENDING = ".tensor.swp"


def copy_parameters_from_swap_buffers() -> None:
    """Give a gathered parameter its own memory instead of the swap buffer into which DeepSpeed read it.

    DeepSpeed returns the buffer on the CPU with one rank. It is used again once the module has run, but activation
    checkpointing (`use_reentrant=False`) keeps the weights of recomputed operators by their memory until their backward
    pass, which would then use another parameter's numbers: silently wrong gradients. With CUDA or more ranks it copies.
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


def sub_groups_of(engine: Any) -> dict[str, list[Any]]:
    """Names and elements of the optimizer's sub-groups on this rank, to be saved with a checkpoint.

    The files on disk carry these names, which differ from process to process: they count parameters.
    """
    zero = engine.optimizer
    names = [flat.ds_id for flat in zero.fp32_partitioned_groups_flat]
    return {"names": names, "numels": [int(numel) for numel in zero.fp16_partitioned_groups_flat_numel]}


def restore_swapped_optimizer(engine: Any, folder: Path, rank: int, saved_groups: dict[str, list[Any]] | None) -> None:
    """Give an optimizer on disk its weights and states back.

    `DeepSpeedEngine.load_checkpoint` copies the files of master weights and moments and does nothing else. The
    optimizer would start with no step count and new moments, and sub-groups too small for the disk would keep their
    initial weights. So would all others if this process counts parameters differently from the one that saved. Only the
    losses would show it.

    Args:
        engine: The engine that has just loaded the checkpoint.
        folder: The checkpoint.
        rank: Rank of this process.
        saved_groups: Return value of `sub_groups_of` when the checkpoint was saved.

    Raises:
        ValueError: If the checkpoint has other sub-groups.
    """
    zero, here = engine.optimizer, sub_groups_of(engine)
    if saved_groups is None or saved_groups["numels"] != here["numels"]:
        raise ValueError(
            f"`ckpt_path={str(folder)!r}` was not written by `memfit_zero_infinity` with this run's sub-groups. Resume "
            "with the same optimizer groups, ranks and `sub_group_size`; or start a new optimizer from the weights."
        )
    inside = _inside(folder)
    (file,) = inside.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    states = saved["optimizer_state_dict"]
    zero.checkpoint_event_prologue()
    _copy_files(zero, _files(inside, rank), dict(zip(saved_groups["names"], here["names"], strict=True)))
    for sub_group, weights in enumerate(saved["fp32_flat_groups"]):
        if not zero._swappable_optimizer_subgroup(sub_group):
            zero.fp32_partitioned_groups_flat[sub_group].data.copy_(weights)
    zero.reset_swap_buffers()  # writes the parameters anew from the master weights
    for group, was in zip(zero.optimizer.param_groups, states["param_groups"], strict=True):
        group.update({key: value for key, value in was.items() if key != "params"})
    for number, sub_group in enumerate(_in_saved_order(zero)):
        if number in states["state"]:
            _restore_sub_group(zero, sub_group, states["state"][number])
    zero.checkpoint_event_epilogue()


def _copy_files(zero: Any, source: Path, names: dict[str, str]) -> None:
    """Rename a rank's files to the names of this process; upstream has copied them under the old names."""
    target = Path(zero.optimizer_swapper.swap_folder)
    for path in source.glob(f"*{_ENDING}"):
        if path.name not in {f"{state}{name}{_ENDING}" for name in names.values() for state in _states(path)}:
            (target / path.name).unlink(missing_ok=True)
    for path in source.glob(f"*{_ENDING}"):
        state, dash, old = path.name.removesuffix(_ENDING).rpartition("-")
        shutil.copyfile(path, target / f"{state}{dash}{names[old]}{_ENDING}")


def _states(path: Path) -> tuple[str, str]:
    """Nothing, for master weights, or the beginning that names a state, `exp_avg-`."""
    state, dash, _ = path.name.removesuffix(_ENDING).rpartition("-")
    return "", f"{state}{dash}"


@contextmanager
def reading_swapped_weights() -> Iterator[None]:
    """Make DeepSpeed put whole weights together from a checkpoint whose master weights are files of their own.

    `zero_to_fp32` finds empty tensors in place of the master weights, and stops.
    """
    from deepspeed.utils import zero_to_fp32

    plain = zero_to_fp32.parse_optim_states

    def parse(files: list[str], folder: str) -> Any:
        result = plain(files, folder)
        first = sorted(Path(folder).glob("*mp_rank_00_model_states.pt"))[0]
        saved = torch.load(first, map_location="cpu", weights_only=False, mmap=True).get(SUB_GROUPS)
        if saved is not None:
            for rank, flats in enumerate(result[2]):
                flats[:] = [
                    flat if flat.numel() else _read(_files(Path(folder), rank) / f"{name}{_ENDING}", numel)
                    for flat, name, numel in zip(flats, saved["names"], saved["numels"], strict=True)
                ]
        return result

    zero_to_fp32.parse_optim_states = parse
    try:
        yield
    finally:
        zero_to_fp32.parse_optim_states = plain


def _read(path: Path, numel: int) -> torch.Tensor:
    return torch.from_file(str(path), size=numel, dtype=torch.float32)


def _inside(folder: Path) -> Path:
    return folder / (folder / "latest").read_text().strip()


def _files(inside: Path, rank: int) -> Path:
    return inside / "offloaded_tensors" / f"rank{rank:02d}"


def _in_saved_order(zero: Any) -> list[int]:
    """Sub-groups by parameter group, as `torch.optim` numbers them in a state dict."""
    return sorted(range(len(zero.fp16_groups)), key=lambda number: zero.sub_group_to_group_id[number])


def _restore_sub_group(zero: Any, sub_group: int, saved: dict[str, Any]) -> None:
    parameter = zero.fp32_partitioned_groups_flat[sub_group]
    numel = int(zero.fp16_partitioned_groups_flat_numel[sub_group])
    swapped = zero._swappable_optimizer_subgroup(sub_group)
    zero.optimizer.state[parameter] = {
        # Tensors on disk were saved empty; DeepSpeed looks on disk for them because of their size.
        name: torch.empty(numel) if swapped and torch.is_tensor(value) and value.dim() and not value.numel() else value
        for name, value in saved.items()
    }
    if swapped:
        info = zero.optimizer_swapper._get_param_swap_info(parameter)  # enters the states by the names of their files
        for tensor in info.tensors[1:]:
            tensor.release_memory()


@contextmanager
def loading_swapped_parameters() -> Iterator[None]:
    """Make stage 3 load a checkpoint while parameters are on disk and the optimizer isn't.

    `_rigid_load_state_dict` copies master weights into a flat buffer of each sub-group. Those on disk have no buffer,
    and are written instead.
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
