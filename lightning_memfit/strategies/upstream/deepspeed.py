"""Everything that the strategies change or read in DeepSpeed by names that are not public.

Written for DeepSpeed 0.19.8; `test_upstream_names.py` and `test_zero_infinity.py` fail if these names move.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memfit.memory.collectives import gathered
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.strategies.integrity import all_succeed, stored_bytes, within
from lightning_memfit.strategies.safe_loading import load
from lightning_memfit.strategies.saved_run import (
    EXTRA_STATE,
    PARAMETERS,
    VERSIONS,
    Pieces,
    SavedOptimizer,
    SavedRun,
    Undivided,
    check_shapes,
    listed,
    pieces_of,
    whole,
)
from lightning_memfit.strategies.upstream.huggingface import is_loading_pretrained


def disable_shared_memory_collectives() -> None:
    """Make gloo do all collectives on the CPU.

    DeepSpeed spends a minute compiling its shared-memory collectives at first use, and they assume that all ranks are
    on one machine.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


class _Asked(dict[str, Any]):
    """A dict that notes which keys it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: set[str] = set()

    def __copy__(self) -> "_Asked":
        return self

    @override
    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    @override
    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


@cache
def known_options() -> frozenset[str]:
    """Names that a DeepSpeed configuration may have at its top: DeepSpeed asks for them or has constants for them."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    asked = _Asked(train_micro_batch_size_per_gpu=1)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        DeepSpeedConfig(asked)
    finally:
        logger.setLevel(level)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("deepspeed.")]
    constants = (
        value
        for module in modules
        if module.__name__.rpartition(".")[2] in ("config", "constants")
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and value.isidentifier()
    )
    where_processes_are_known = {"data_parallel_size", "sequence_parallel_size"}
    return frozenset(asked.names | set(constants) | where_processes_are_known)


@contextmanager
def failing_together(path: str | Path, engine: Any) -> Iterator[None]:
    """Let ranks that wait for each other while DeepSpeed saves a checkpoint learn that one of them has failed.

    They would wait in its barriers until the communication's timeout, half an hour.

    Args:
        path: The checkpoint, for messages.
        engine: The engine that saves; with stage 3 it gathers weights afterwards.
    """
    from deepspeed import comm

    def barrier(*_: Any, **__: Any) -> None:
        all_succeed(path)

    def after_all(epilogue: Callable[[], None]) -> None:
        all_succeed(path)
        epilogue()

    has_epilogue = hasattr(engine.optimizer, "checkpoint_event_epilogue")
    unwrap = wrap_method(engine.optimizer, "checkpoint_event_epilogue", after_all) if has_epilogue else None
    before, comm.barrier = comm.barrier, barrier
    try:
        yield
    finally:
        comm.barrier = before
        if unwrap is not None:
            unwrap()


@contextmanager
def copying_whole_weights() -> Iterator[None]:
    """Give copies of networks whole weights while ZeRO-3 partitions parameters as they are made.

    A partitioned parameter has the shape `(0,)` until a layer computes with it. To `other.load_state_dict(
    network.state_dict())`, by which references, target networks and averages are made, both sides then look alike, and
    nothing is copied; `deepcopy(network)` has parameters without elements for good, and so has `Parameter(weight)`, by
    which parametrizations take weights over. Inside this context they gather what they copy, layer by layer and on all
    ranks: a state dict holds whole weights in host memory, and what is loaded is the first rank's. Transformers'
    `from_pretrained` gathers by itself what it loads, on one rank without the others in between, and asks for names and
    shapes of weights alone: nothing is gathered for it.
    """
    module: Any = torch.nn.Module
    parameter: Any = torch.nn.Parameter
    load, save, copy = module._load_from_state_dict, module._save_to_state_dict, parameter.__deepcopy__
    make = vars(parameter)["__new__"]

    def load_whole(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        with gathered(() if is_loading_pretrained() else layer._parameters.values(), modifier_rank=0):
            load(layer, *args, **kwargs)

    def save_whole(layer: torch.nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save(layer, destination, prefix, keep_vars)
        for name, own in () if keep_vars or is_loading_pretrained() else layer._parameters.items():
            with gathered([own]) as away:
                if away:
                    destination[prefix + name] = away[0].detach().to("cpu", copy=True)

    def copy_whole(one: Any, memo: dict[int, Any]) -> Any:
        with gathered([one]) as away:
            made = copy(one, memo)
        if away:
            one.convert_to_zero_parameters([made])
        return made

    def make_whole(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
        with gathered(() if is_loading_pretrained() else [data]):
            return make.__func__(kind, data, requires_grad)

    module._load_from_state_dict, module._save_to_state_dict = load_whole, save_whole
    parameter.__deepcopy__, parameter.__new__ = copy_whole, staticmethod(make_whole)
    try:
        yield
    finally:
        module._load_from_state_dict, module._save_to_state_dict = load, save
        parameter.__deepcopy__, parameter.__new__ = copy, make


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


def step_by_gradients_of_the_window() -> None:
    """Let each parameter be stepped by what the passes since the last step have brought, and by nothing else.

    Stage 3 copies gradients into buffers that it never clears: a parameter that takes no part in a step is stepped once
    more by an earlier one's gradient. With states on the host or on disk, all stages bring a gradient there in the last
    pass of an accumulation only, and only if the parameter takes part in that pass.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if hasattr(DeepSpeedZeroOptimizer.step, "plain"):
        return
    DeepSpeedZeroOptimizer_Stage3.step = _after(_offload_rest_in_parts, DeepSpeedZeroOptimizer_Stage3.step)
    DeepSpeedZeroOptimizer.step = _after(_offload_rest, DeepSpeedZeroOptimizer.step)
    DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu = _accumulating_anew(
        DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu
    )
    DeepSpeedZeroOptimizer_Stage3.zero_grad = _forgetting(_forget_in_parts, DeepSpeedZeroOptimizer_Stage3.zero_grad)
    DeepSpeedZeroOptimizer.zero_grad = _forgetting(_forget, DeepSpeedZeroOptimizer.zero_grad)


def _after(prepare: Callable[[Any], None], plain: Callable[..., None]) -> Callable[..., None]:
    def step(self: Any, closure: Any = None) -> None:
        prepare(self)
        plain(self, closure)
        if hasattr(self, "grad_partitions_flat_buffer"):
            self.grad_partitions_flat_buffer.zero_()

    step.plain = plain  # type: ignore[attr-defined]
    return step


def _offload_rest_in_parts(zero: Any) -> None:
    """Bring gradients to the host that the last pass has not, in stage 3."""
    if not zero.offload_optimizer:
        return
    gradients: dict[int, list[Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    begin = 0
    for parameter in chain.from_iterable(zero.fp16_groups):
        numel = parameter.partition_numel()
        if parameter.requires_grad and zero.get_param_id(parameter) not in zero.norm_for_param_grads:
            gradient = zero.grad_partitions_flat_buffer.narrow(0, begin, numel)
            zero._offload_grad_partition_at_boundary(parameter, gradient, gradients, offsets)
        begin += numel
    zero._swap_out_offload_fp32_gradients(gradients, offsets)


def _offload_rest(zero: Any) -> None:
    """Bring gradients to the host that the last pass has not, in stages 1 and 2."""
    if not zero.cpu_offload:
        return
    for position, parameters in enumerate(zero.params_in_partition):
        for parameter in parameters:
            number = zero.get_param_id(parameter)
            if not parameter.requires_grad or number in zero.norm_for_param_grads:
                continue
            if number in zero._offload_accumulated_param_ids:
                zero._restore_cpu_offload_grad_to_gpu(parameter)
                zero.set_norm_for_param_grad_in_gpu(parameter)
                zero.update_offload_overflow_tracker_for_param_grad(parameter)
                zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)
                continue
            gradients = zero.single_partition_of_fp32_groups[position].grad
            if gradients is not None:
                _, _, begin, numel = zero.grad_position[number]
                gradients.view(-1).narrow(0, begin, numel).zero_()


def _accumulating_anew(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Begin with zero where a parameter took no part in the first pass of an accumulation."""

    def accumulate(self: Any, param: Any) -> None:
        number = self.get_param_id(param)
        is_first = number not in self._offload_accumulated_param_ids
        if self.micro_step_id > 0 and is_first and number in self.accumulated_grads_in_cpu:
            self.accumulated_grads_in_cpu[number].zero_()
        plain(self, param)

    return accumulate


def _forgetting(forget: Callable[[Any], None], plain: Callable[..., None]) -> Callable[..., None]:
    """Let `zero_grad` between a backward pass and the step throw away what DeepSpeed has reduced, too."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        forget(self)
        plain(self, set_to_none)

    return zero_grad


def _forget_in_parts(zero: Any) -> None:
    if zero.micro_step_id > 0 or zero._epilogue_ran_this_backward:
        zero.grad_partitions_flat_buffer.zero_()
        zero._offload_boundary_param_ids.clear()
        if zero.offload_optimizer:
            zero.norm_for_param_grads.clear()


def _forget(zero: Any) -> None:
    if zero.micro_step_id < 0 and not zero._epilogue_ran_this_backward:
        return
    zero.micro_step_id = -1  # the next pass is the first one
    for kept in (zero.averaged_gradients, zero.all_grad_tensors):
        kept.update(dict.fromkeys(kept))
    if zero.cpu_offload:
        zero.norm_for_param_grads.clear()
        zero._offload_accumulated_param_ids.clear()


def begin_pass(engine: Any) -> None:
    """Tell an engine that a backward pass begins, which it learns from `forward` alone: a step may run several."""
    engine.optimizer.clear_backward_seen_flag()


@contextmanager
def removing_engine_hooks_only() -> Iterator[None]:
    """Let a module keep the user's hooks while Lightning makes an engine that evaluates.

    It takes away all of them, for good, to be rid of those of an earlier engine.
    """
    from lightning.pytorch.strategies import deepspeed

    plain, deepspeed.remove_module_hooks = deepspeed.remove_module_hooks, remove_engine_hooks
    try:
        yield
    finally:
        deepspeed.remove_module_hooks = plain


def remove_engine_hooks(model: torch.nn.Module) -> None:
    """Take away the hooks that an engine of DeepSpeed has given a module, in which it would go on working."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("deepspeed."):
                    del hooks[key]


def gather_before_hooks(model: torch.nn.Module) -> None:
    """Let what a user's hooks do before a layer's forward find its weights whole: an engine gathers them after these.

    `torch.nn.utils.weight_norm` computes the weight there; of weights without elements, torch ends the process.
    """
    for module in model.modules():
        hooks: Any = module._forward_pre_hooks
        own = [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("deepspeed.")]
        for key in reversed(own):
            hooks.move_to_end(key, last=False)


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


def swap_in_own_dtype() -> None:
    """Let `zero.Init` heed the dtype it is given, as for weights that were made outside of it.

    `_set_dtype` reads `dtype or torch.float16 if ... else torch.bfloat16`, which is `(dtype or torch.float16) if ...`:
    where fp16 isn't supported, as on the CPU, it ignores `dtype`, and fp32 weights would be read from disk as bf16.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Init

    plain = Init._set_dtype
    if hasattr(plain, "heeds_dtype"):
        return

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        plain(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    set_dtype.heeds_dtype = True  # type: ignore[attr-defined]
    Init._set_dtype = set_dtype


def free_states_once_swapped() -> None:
    """Free the states that an optimizer makes in its first step as soon as `pipeline` has them in swap buffers.

    `PartitionedOptimizerSwapper` releases them after each sub-group. `PipelinedOptimizerSwapper` doesn't, so that the
    states of all sub-groups stay in memory until the second step reads them from disk.
    """
    from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

    plain = PipelinedOptimizerSwapper._swap_out_optimizer_state
    if hasattr(plain, "frees_states"):
        return

    def swap_out(self: Any, aio_handle: Any, parameter: Any, swap_in_op: Any) -> Any:
        operation = plain(self, aio_handle, parameter, swap_in_op)
        for state in swap_in_op.param_info.get_unpinned_state_tensors():
            state.data = torch.Tensor()  # as `SwapTensorContext.release_memory` does
        return operation

    swap_out.frees_states = True  # type: ignore[attr-defined]
    PipelinedOptimizerSwapper._swap_out_optimizer_state = swap_out


def sub_groups_of(engine: Any) -> dict[str, list[Any]]:
    """Names and elements of the optimizer's sub-groups on this rank, to be saved with a checkpoint.

    The files on disk carry these names, which differ from process to process: they count parameters.
    """
    zero = engine.optimizer
    names = [flat.ds_id for flat in zero.fp32_partitioned_groups_flat]
    return {"names": names, "numels": [int(numel) for numel in zero.fp16_partitioned_groups_flat_numel]}


def _swapped_files(inside: Path, rank: int) -> Path:
    return inside / "offloaded_tensors" / f"rank{rank:02d}"


# --- checkpoints ----------------------------------------------------------------------------------------------------

ZERO_MARK = "latest"
"""The file by which a folder is known to be DeepSpeed's; it is written last and names the folder inside."""

_OWN_KEYS = {
    "buffer_names",
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "dp_world_size",
    "ds_config",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "global_samples",
    "global_steps",
    "lr_scheduler",
    "module",
    "mp_world_size",
    "optimizer",
    "param_shapes",
    "random_ltd",
    "shared_params",
    "skipped_steps",
    SUB_GROUPS,
}
"""Keys that DeepSpeed 0.19 and we add to the file that also holds what Lightning saves."""


@dataclass
class _SubGroup:
    """Parameters whose master weights and states are one flat tensor on each rank.

    Attributes:
        spans: Name, place in a rank's flat tensor, and first and last element of each parameter's part, by rank.
        masters: Flat master weights, by rank.
        states: States of the flat tensor, by rank.
        options: Those of its optimizer group, whose number is `group`.
    """

    spans: list[list[tuple[str, int, int, int]]]
    masters: list[Tensor]
    states: list[dict[str, Any]]
    group: int


@dataclass
class ZeroLayout:
    """How a folder of DeepSpeed's divides master weights and states."""

    stage: int
    world_size: int
    sub_groups: list[_SubGroup]
    engine: dict[str, Any]
    """Counters of the engine and the state of the loss scale."""


def save_what_is_not_stepped(engine: Any) -> None:
    """Let a checkpoint hold parameters that no optimizer group has: DeepSpeed saves those besides that are frozen."""
    plain = engine._get_zero_frozen_param_attributes

    def attributes(of_parameter: Callable[[Any], Any]) -> Any:
        found = plain(of_parameter)
        for parameter, name in _not_stepped(engine):
            if parameter.requires_grad and name not in found:
                found[name] = of_parameter(parameter)
        return found

    engine._get_zero_frozen_param_attributes = attributes


def stepped_by(engine: Any) -> list[Any]:
    """Parameters that optimizer groups have."""
    zero = engine.optimizer
    groups = zero.fp16_groups if engine.zero_optimization_partition_weights() else zero.bit16_groups
    return list(chain.from_iterable(groups))


def _not_stepped(engine: Any) -> list[tuple[Any, str]]:
    """Parameters that no optimizer group has, and their names."""
    stepped = {id(parameter) for parameter in stepped_by(engine)}
    named = [(parameter, engine.param_names[parameter]) for parameter in engine.module.parameters()]
    return [(parameter, name) for parameter, name in named if id(parameter) not in stepped]


def checkpoint_bytes(engine: Any) -> int:
    """Bytes that this rank is going to write for an engine, without what Lightning adds."""
    zero = engine.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or getattr(
        zero, "single_partition_of_fp32_groups", []
    )
    states = getattr(getattr(zero, "optimizer", None), "state", {})
    flat = stored_bytes([[*masters], [*states.values()]])
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is not None:
        flat += sum(path.stat().st_size for path in Path(swapper.swap_folder).glob(f"*{_ENDING}"))
    if engine.zero_optimization_partition_weights():
        own = [parameter.ds_tensor for parameter, _ in _not_stepped(engine)]
    else:
        own = list(engine.module.parameters()) if torch.distributed.get_rank() == 0 else []
    return flat + stored_bytes([tensor.data for tensor in own])


def read_zero(folder: Path, weights_only: bool | None = None) -> SavedRun:
    """Read a folder that DeepSpeed wrote, of any stage, from memory or disk. Tensors stay on disk until they are used.

    Weights are the optimizer's fp32 master weights.

    Raises:
        ValueError: If files are missing, or were written with options that aren't read here.
    """
    inside = within(folder, (folder / ZERO_MARK).read_text().strip())
    files = [_of_rank(inside, rank, "optim_states") for rank in range(len([*inside.glob("*_optim_states.pt")]))]
    if not files:
        raise ValueError(f"`ckpt_path={str(folder)!r}` holds no files of an optimizer under ZeRO.")
    saved = [load(file, weights_only, of_deepspeed=True)["optimizer_state_dict"] for file in files]
    stage = int(saved[0]["zero_stage"])
    named = [inside / "mp_rank_00_model_states.pt"]
    if stage == 3:
        named = [_of_rank(inside, rank, "model_states") for rank in range(len(files))]
    models = [load(file, weights_only, of_deepspeed=True) for file in named]
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
    sub_groups = _whole_groups(saved, shapes) if stage < 3 else _partitioned_groups(saved, shapes)
    if stage == 3:
        _add_swapped(inside, sub_groups, models)
    weights = _weights(stage, models, sub_groups, {name: shape for group in shapes for name, shape in group.items()})
    base = saved[0]["base_optimizer_state" if stage < 3 else "optimizer_state_dict"]
    optimizer = base | {
        "state": _states(sub_groups, shapes, folder),
        "param_groups": _named_groups(base["param_groups"], sub_groups, models[0]),
    }
    counters = {key: models[0][key] for key in ("global_steps", "global_samples", "skipped_steps") if key in models[0]}
    scale = {key: saved[0][key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow") if key in saved[0]}
    extras = {key: value for key, value in models[0].items() if key not in _OWN_KEYS}
    extras.pop(PARAMETERS, None)  # used by now: states are by names
    versions = extras.pop(VERSIONS, None)
    layout = ZeroLayout(stage, len(files), sub_groups, counters | {"scale": scale})
    return SavedRun(folder, weights, extras, [optimizer], layout, versions)


def _of_rank(inside: Path, rank: int, kind: str) -> Path:
    """The file of a rank; its name begins otherwise in bf16."""
    found = [*inside.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}.pt")]
    if len(found) != 1:
        raise ValueError(f"`ckpt_path={str(inside.parent)!r}` has {len(found)} files of rank {rank} for {kind}, not 1.")
    return found[0]


def _whole_groups(saved: Sequence[dict[str, Any]], shapes: Sequence[dict[str, torch.Size]]) -> list[_SubGroup]:
    """Stages 1 and 2: a group's parameters one after the other, cut into as many equal parts as there are ranks."""
    if isinstance(saved[0]["base_optimizer_state"], list):
        raise ValueError("`elastic_checkpoint: true` of DeepSpeed is not read. Save with `elastic_checkpoint: false`.")
    sub_groups = []
    for number, group in enumerate(shapes):
        paddings = saved[0].get("param_alignment_paddings") or [[0] * len(group) for _ in shapes]
        size = saved[0]["single_partition_of_fp32_groups"][number].numel() + saved[0]["group_paddings"][number]
        offsets, offset = [], 0
        for shape, padding in zip(group.values(), paddings[number], strict=True):
            offsets.append(offset)
            offset += shape.numel() + padding
        spans = [_cut(group, offsets, rank * size, (rank + 1) * size) for rank in range(len(saved))]
        key = saved[0]["base_optimizer_state"]["param_groups"][number]["params"][0]
        sub_groups.append(
            _SubGroup(
                spans,
                [of_rank["single_partition_of_fp32_groups"][number] for of_rank in saved],
                [dict(of_rank["base_optimizer_state"]["state"].get(key, {})) for of_rank in saved],
                number,
            )
        )
    return sub_groups


def _cut(shapes: Mapping[str, Any], offsets: Sequence[int], begin: int, end: int) -> list[tuple[str, int, int, int]]:
    """The parts of parameters in a range of a flat group: names, places in the range, first and last elements."""
    spans = []
    for (name, shape), offset in zip(shapes.items(), offsets, strict=True):
        start, stop = max(begin - offset, 0), min(end - offset, shape.numel())
        if start < stop:
            spans.append((name, offset + start - begin, start, stop))
    return spans


def _partitioned_groups(saved: Sequence[dict[str, Any]], shapes: Sequence[dict[str, torch.Size]]) -> list[_SubGroup]:
    """Stage 3: every parameter is cut by itself; a rank's sub-group holds its parts of some parameters."""
    world_size = len(saved)
    group_of = {
        number: index
        for index, group in enumerate(saved[0]["optimizer_state_dict"]["param_groups"])
        for number in group["params"]
    }
    return [
        _SubGroup(
            [_parts(group, rank, world_size) for rank in range(world_size)],
            [of_rank["fp32_flat_groups"][number] for of_rank in saved],
            [dict(of_rank["optimizer_state_dict"]["state"].get(number, {})) for of_rank in saved],
            group_of[number],
        )
        for number, group in enumerate(shapes)
    ]


def _parts(shapes: Mapping[str, Any], rank: int, world_size: int) -> list[tuple[str, int, int, int]]:
    spans, place = [], 0
    for name, shape in shapes.items():
        part = -(-shape.numel() // world_size)
        start, stop = rank * part, min((rank + 1) * part, shape.numel())
        if start < stop:
            spans.append((name, place, start, stop))
        place += part
    return spans


def _add_swapped(inside: Path, sub_groups: Sequence[_SubGroup], models: Sequence[dict[str, Any]]) -> None:
    """Put in what lay in files of its own: DeepSpeed saves empty tensors in its place."""
    for rank, model in enumerate(models):
        swapped = model.get(SUB_GROUPS)
        if swapped is None:
            continue
        for number, sub_group in enumerate(sub_groups):
            name, numel = swapped["names"][number], swapped["numels"][number]
            files = _swapped_files(inside, rank)
            if not sub_group.masters[rank].numel() and numel:
                sub_group.masters[rank] = _read(within(files, f"{name}{_ENDING}"), numel)
            for key, value in sub_group.states[rank].items():
                if torch.is_tensor(value) and value.dim() and not value.numel() and numel:
                    sub_group.states[rank][key] = _read(within(files, f"{key}-{name}{_ENDING}"), numel)


def _read(path: Path, numel: int) -> Tensor:
    return torch.from_file(str(path), size=numel, dtype=torch.float32)


def _pieces(
    sub_groups: Sequence[_SubGroup], shapes: Mapping[str, torch.Size], flat: Callable[..., Any]
) -> dict[str, Pieces]:
    """Tensors by names of parameters, from one flat tensor of each sub-group and rank."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for sub_group in sub_groups:
        for rank, spans in enumerate(sub_group.spans):
            values = flat(sub_group, rank)
            for name, place, start, stop in spans if values is not None else ():
                parts.setdefault(name, []).append((start, values[place : place + stop - start]))
    return {name: Pieces(shapes[name], sorted(found, key=lambda part: part[0])) for name, found in parts.items()}


def _weights(
    stage: int, models: Sequence[dict[str, Any]], sub_groups: Sequence[_SubGroup], shapes: Mapping[str, torch.Size]
) -> dict[str, Pieces]:
    model = models[0]
    weights = _pieces(sub_groups, shapes, lambda sub_group, rank: sub_group.masters[rank])
    for name in model["buffer_names"]:
        if name in model["module"]:
            weights[name] = pieces_of(_widened(model["module"][name]))
    for name, value in model["module"].items():
        if name.rsplit(".", 1)[-1] == EXTRA_STATE:
            weights[name] = value
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts, start = [], 0
        for fragments in (one["frozen_param_fragments"] for one in models):
            flat = fragments[name].reshape(-1)
            parts.append((start, flat[: shape.numel() - start]))
            start += flat.numel()
        weights[name] = Pieces(torch.Size(shape), [part for part in parts if part[1].numel() or not part[0]])
    for name, stored in model["shared_params"].items():
        if stored in weights:
            weights[name] = weights[stored]
    if stage < 3:  # whole: also what no optimizer group had
        for name, value in model["module"].items():
            if name not in weights and torch.is_tensor(value):
                weights[name] = pieces_of(_widened(value))
    return weights


def _widened(value: Any) -> Any:
    """What a run in half precision keeps, in float32 as the master weights are; float64 stays."""
    return value.float() if torch.is_tensor(value) and value.dtype in (torch.float16, torch.bfloat16) else value


def _is_flat(value: Any, master: Tensor) -> bool:
    """Whether a state has an element for each of the master weights, which may lack the padding at their end."""
    return torch.is_tensor(value) and value.dim() == 1 and value.numel() >= master.numel() > 0


def _states(
    sub_groups: Sequence[_SubGroup], shapes: Sequence[Mapping[str, torch.Size]], path: Path
) -> dict[str, dict[str, Any]]:
    """States by names of parameters. What a flat tensor has one number of, all its parameters get."""
    flat_shapes = {name: shape for group in shapes for name, shape in group.items()}
    states: dict[str, dict[str, Any]] = {}
    for sub_group in sub_groups:
        for key, value in sub_group.states[0].items():
            if _is_flat(value, sub_group.masters[0]):
                found = _pieces([sub_group], flat_shapes, lambda one, rank, key=key: one.states[rank].get(key))
                for name, pieces in found.items():
                    states.setdefault(name, {})[key] = pieces
                continue
            for name in {span[0] for spans in sub_group.spans for span in spans}:
                shared = Undivided(key, path) if torch.is_tensor(value) and value.numel() > 1 else value
                states.setdefault(name, {})[key] = shared.clone() if torch.is_tensor(shared) else shared
    return {name.replace("_orig_mod.", ""): state for name, state in states.items()}


def _named_groups(
    groups: Sequence[dict[str, Any]], sub_groups: Sequence[_SubGroup], model: dict[str, Any]
) -> list[dict[str, Any]]:
    """Options of the groups with names of their parameters; frozen ones, which DeepSpeed leaves out, included."""
    named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    for sub_group in sub_groups:
        found = dict.fromkeys(span[0].replace("_orig_mod.", "") for spans in sub_group.spans for span in spans)
        named[sub_group.group]["params"] += found
    for names in model.get(PARAMETERS, [[]])[0]:
        for group in named:
            if set(group["params"]) & set(names):
                group["params"] = list(names)
    return named


@torch.no_grad()
def take_buffers(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Give a module on every rank the buffers and extra states of a checkpoint.

    Args:
        module: The module.
        weights: What the checkpoint has under the names of the module's state.
    """
    for name, buffer in module.named_buffers():
        if name in weights:
            buffer.copy_(whole(weights[name]))
    for name, value in weights.items():
        prefix, _, last = name.rpartition(".")
        if last == EXTRA_STATE:
            module.get_submodule(prefix).set_extra_state(whole(value))


@torch.no_grad()
def take_run(engine: Any, saved: SavedRun, optimizers: Sequence[SavedOptimizer]) -> None:
    """Give an engine that trains the weights, states and groups of a checkpoint, whatever wrote it.

    `DeepSpeedEngine.load_checkpoint` does so for checkpoints of its own stage and number of ranks only, and runs what
    is hidden in them. Each rank reads its own parts.

    Args:
        engine: A new engine.
        saved: The checkpoint.
        optimizers: Its optimizer by names; none to start a new one from the weights.

    Raises:
        ValueError: If the optimizer's states can't be divided as this engine divides them.
    """
    zero = engine.optimizer
    names: dict[Any, str] = engine.param_names
    is_partitioned = engine.zero_optimization_partition_weights()
    check_shapes(saved.path, saved.weights, engine.module)
    for optimizer in optimizers:
        optimizer.refuse_beside(zero.optimizer)
    if is_partitioned:
        zero.checkpoint_event_prologue()
    live = _live_partitioned(zero, names) if is_partitioned else _live_whole(zero, names)
    stepped = {name for one in live for name, _ in one.all}
    take_buffers(engine.module, saved.weights)
    for parameter, name in names.items():
        if name not in saved.weights:
            continue
        if not is_partitioned:
            parameter.copy_(saved.weights[name].whole())
        elif name not in stepped:
            parameter.ds_tensor.copy_(_padded(saved.weights[name], parameter))
    by_name = optimizers[0] if optimizers else None
    same = by_name is not None and _is_same_layout(saved.layout, live, 3 if is_partitioned else 2)
    for number, one in enumerate(live):
        swapped = is_partitioned and zero._swappable_optimizer_subgroup(number)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(number)
        _fill(one.master, one, saved.weights, keep_missing=True)
        if by_name is not None:
            options = by_name.options([span[0].replace("_orig_mod.", "") for span in one.all], one.options)
            one.options.update({key: value for key, value in options.items() if key != "params"})
            kept = saved.layout.sub_groups[number].states[one.rank] if same else None
            zero.optimizer.state[one.master] = (
                {key: _alike(value, one) for key, value in kept.items()} if kept is not None else _divided(one, by_name)
            )
        if is_partitioned:
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(number)
    if is_partitioned:
        if len(zero.persistent_parameters) > 0:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()
    if isinstance(saved.layout, ZeroLayout):
        for key, value in saved.layout.engine.items():
            if key != "scale":
                setattr(engine, key, value)
        if saved.layout.engine["scale"].get("dynamic_loss_scale") and zero.dynamic_loss_scale:
            zero.loss_scaler = saved.layout.engine["scale"]["loss_scaler"]
    else:
        engine.global_steps = int(saved.extras.get("global_step", 0))


@dataclass
class _Live:
    """A flat tensor of master weights on this rank."""

    master: Tensor
    spans: list[tuple[str, int, int, int]]
    all: list[tuple[str, int]]
    """Names and elements of all its parameters, of which this rank may have no part."""
    options: dict[str, Any]
    rank: int
    world_size: int


def _live_whole(zero: Any, names: Mapping[Any, str]) -> list[_Live]:
    live = []
    for number, parameters in enumerate(zero.round_robin_bit16_groups):
        process_group = zero.real_dp_process_group[number]
        rank, size = torch.distributed.get_rank(process_group), int(zero.partition_size[number])
        shapes = {names[parameter]: parameter.shape for parameter in parameters}
        spans = _cut(shapes, zero.round_robin_bit16_offsets[number], rank * size, (rank + 1) * size)
        own = [(name, shape.numel()) for name, shape in shapes.items()]
        live.append(
            _Live(
                zero.single_partition_of_fp32_groups[number],
                spans,
                own,
                zero.optimizer.param_groups[number],
                rank,
                torch.distributed.get_world_size(process_group),
            )
        )
    return live


def _live_partitioned(zero: Any, names: Mapping[Any, str]) -> list[_Live]:
    rank, world_size = (
        get(zero.dp_process_group) for get in (torch.distributed.get_rank, torch.distributed.get_world_size)
    )
    live = []
    for number, parameters in enumerate(zero.fp16_groups):
        shapes = {names[parameter]: torch.Size(parameter.ds_shape) for parameter in parameters}
        live.append(
            _Live(
                zero.fp32_partitioned_groups_flat[number],
                _parts(shapes, rank, world_size),
                [(name, shape.numel()) for name, shape in shapes.items()],
                zero.optimizer.param_groups[zero.sub_group_to_group_id[number]],
                rank,
                world_size,
            )
        )
    return live


def _is_same_layout(layout: Any, live: Sequence[_Live], stage: int) -> bool:
    """Whether a checkpoint divides master weights exactly as this run does, so that states need not be cut anew."""
    if not isinstance(layout, ZeroLayout) or max(layout.stage, 2) != stage or layout.world_size != live[0].world_size:
        return False
    return len(layout.sub_groups) == len(live) and all(
        saved.spans[one.rank] == one.spans for saved, one in zip(layout.sub_groups, live, strict=True)
    )


def _padded(pieces: Pieces, parameter: Any) -> Tensor:
    """This rank's part of a parameter that is not stepped, under stage 3."""
    part = torch.zeros(parameter.ds_tensor.shape)
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    found = pieces.between(rank * part.numel(), (rank + 1) * part.numel())
    part.view(-1)[: found.numel()] = found
    return part


def _fill(flat: Tensor, one: _Live, tensors: Mapping[str, Pieces], keep_missing: bool = False) -> None:
    """Write this rank's parts of parameters into a flat tensor; what pads it is zero.

    Args:
        flat: The tensor.
        one: Which parts it has.
        tensors: The parameters.
        keep_missing: Leave parts of parameters that are not among them as they are.
    """
    spans = [(flat[place : place + stop - start], name, start, stop) for name, place, start, stop in one.spans]
    kept = [(part, part.clone()) for part, name, _, _ in spans if keep_missing and name not in tensors]
    flat.zero_()
    for part, name, start, stop in spans:
        if name in tensors or not keep_missing:
            part.copy_(tensors[name].between(start, stop))
    for part, value in kept:
        part.copy_(value)


def _alike(value: Any, one: _Live) -> Any:
    """A state as it was saved, where this optimizer steps."""
    if not torch.is_tensor(value):
        return value
    on_host = not value.dim() and not (one.options.get("fused") or one.options.get("capturable"))
    return value.clone() if on_host else value.to(one.master.device, copy=True)


_COUNTERS = {"eta", "mu", "mu_product", "step"}
"""States of torch's optimizers that have no dimension, which in a parameter of one element look like its moments."""


def _are_scalars(values: Iterable[Any]) -> bool:
    return all(not isinstance(value, Pieces) and not value.dim() for value in values)


def _not_in_one(path: str | Path, key: str, values: Mapping[str, Any]) -> str:
    """Say why states of some parameters don't go into one tensor: those without any, else those unlike most others."""
    lacking = [name for name, value in values.items() if value is None]
    what = f"has no state {key!r} for {listed(lacking)}, which no step of the saved run has changed"
    if not lacking:
        shown = {name: _in_words(value) for name, value in values.items()}
        usual = Counter(shown.values()).most_common(1)[0][0]
        unlike = [name for name, text in shown.items() if text != usual]
        what = f"has a state {key!r} for {listed(unlike or list(shown))} that is not like that of the others"
    return (
        f"`ckpt_path={str(path)!r}` {what}. ZeRO keeps the states of all parameters in one tensor, and can't resume "
        "so. Resume with the strategy that wrote it, or load the weights alone (`load_full_weights: true`)."
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Pieces) or (torch.is_tensor(value) and value.dim()):
        return "as large as the parameter"
    return repr(value)


def _divided(one: _Live, saved: SavedOptimizer) -> dict[str, Any]:
    """States of a flat tensor from those of its parameters."""
    names = [name for name, _ in one.all]
    states = [saved.states.get(name.replace("_orig_mod.", ""), {}) for name in names]
    keys = {key for state in states for key in state}
    made: dict[str, Any] = {}
    for key in sorted(keys):
        values = {name: state.get(key) for name, state in zip(names, states, strict=True)}
        for value in values.values():
            if isinstance(value, Undivided):
                value.refuse()
        tensors = {
            name: value if isinstance(value, Pieces) else Pieces.of(value)
            for (name, numel), value in zip(one.all, values.values(), strict=True)
            if isinstance(value, Pieces) or (torch.is_tensor(value) and value.numel() == numel)
        }
        if len(tensors) == len(values) and not (key in _COUNTERS and _are_scalars(values.values())):
            made[key] = torch.zeros_like(one.master)
            _fill(made[key], one, tensors)
            continue
        scalars = [
            value if torch.is_tensor(value) else torch.tensor(value) for value in values.values() if value is not None
        ]
        if len(scalars) != len(values) or any(value.numel() != 1 or value != scalars[0] for value in scalars):
            raise ValueError(_not_in_one(saved.path, key, values))
        made[key] = _alike(next(iter(values.values())), one)
    return made
