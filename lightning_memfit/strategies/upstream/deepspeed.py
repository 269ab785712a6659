"""Everything that the strategies change or read in DeepSpeed by names that are not public.

What replaces a method of DeepSpeed's is cached: it is done once in a process.
Written for DeepSpeed 0.19.8; `test_upstream_names.py` and `test_zero_infinity.py` fail if these names move.
"""

import io
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memfit.memory.collectives import gathered
from lightning_memfit.profile.replaced import replaced
from lightning_memfit.strategies.integrity import ZERO_MARK, remove
from lightning_memfit.strategies.integrity import gathered as gathered_values
from lightning_memfit.strategies.safe_loading import without_code
from lightning_memfit.strategies.saved_names import check_stepped
from lightning_memfit.strategies.upstream.huggingface import is_loading_pretrained


def disable_shared_memory_collectives() -> None:
    """Make gloo do all collectives on the CPU.

    DeepSpeed spends a minute compiling its shared-memory collectives at first use, and they assume that all ranks are
    on one machine.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def whole_weights_in_builds() -> Iterator[None]:
    """Let code that builds a module copy and initialize whole weights, while ZeRO-3 partitions them as they are made.

    A partitioned parameter has the shape `(0,)`: `load_state_dict` of another network's copies nothing, `deepcopy` and
    `Parameter(weight)` have no elements for good, and `nn.init` writes into nothing, all without a word. Inside this
    context they gather what they copy or write, layer by layer and on all ranks; what is written is the first rank's.
    Transformers' `from_pretrained` gathers by itself what it loads.
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

    def initializing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            with gathered(() if is_loading_pretrained() else [tensor], modifier_rank=0):
                return plain(tensor, *args, **kwargs)

        return initialize

    def resetting(plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset(layer: Any) -> None:  # by names of its own for `nn.init`, or after a look at dimensions
            with gathered(layer.parameters(), modifier_rank=0):
                plain(layer)

        return reset

    composed: list[Any] = [torch.nn.MultiheadAttention, torch.nn.Transformer]
    initializers = {name: one for name, one in vars(torch.nn.init).items() if name.endswith("_") and name[0] != "_"}
    with ExitStack() as stack:
        for kind in composed:
            stack.enter_context(replaced(kind, "_reset_parameters", resetting(kind._reset_parameters)))
        for name, one in initializers.items():
            stack.enter_context(replaced(torch.nn.init, name, initializing(one)))
        stack.enter_context(replaced(module, "_load_from_state_dict", load_whole))
        stack.enter_context(replaced(module, "_save_to_state_dict", save_whole))
        stack.enter_context(replaced(parameter, "__deepcopy__", copy_whole))
        stack.enter_context(replaced(parameter, "__new__", staticmethod(make_whole)))
        yield


@cache
def step_by_gradients_of_the_window() -> None:
    """Let each parameter be stepped by what the passes since the last step have brought, and by nothing else.

    Stage 3 copies gradients into buffers that it never clears: a parameter that takes no part in a step is stepped once
    more by an earlier one's gradient. With states on the host or on disk, all stages bring a gradient there in the last
    pass of an accumulation only, and only if the parameter takes part in that pass.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    DeepSpeedZeroOptimizer_Stage3.step = _after(_offload_rest_in_parts, DeepSpeedZeroOptimizer_Stage3.step)
    DeepSpeedZeroOptimizer.step = _after(_offload_rest, DeepSpeedZeroOptimizer.step)
    DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu = _accumulating_anew(
        DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu
    )
    DeepSpeedZeroOptimizer.zero_grad = _forgetting(DeepSpeedZeroOptimizer.zero_grad)


def _after(prepare: Callable[[Any], None], plain: Callable[..., None]) -> Callable[..., None]:
    def step(self: Any, closure: Any = None) -> None:
        prepare(self)
        plain(self, closure)
        if hasattr(self, "grad_partitions_flat_buffer"):
            self.grad_partitions_flat_buffer.zero_()

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


def _forgetting(plain: Callable[..., None]) -> Callable[..., None]:
    """Let `zero_grad` between a backward pass and the step throw away what stages 1 and 2 have reduced, too."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        _forget(self)
        plain(self, set_to_none)

    return zero_grad


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

    with replaced(deepspeed, "remove_module_hooks", remove_engine_hooks):
        yield


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


@cache
def copy_parameters_from_swap_buffers() -> None:
    """Give a gathered parameter its own memory instead of the swap buffer into which DeepSpeed read it.

    DeepSpeed returns the buffer on the CPU with one rank, and uses it again once the module has run. Activation
    checkpointing keeps weights by their memory until backward, which would use another parameter's numbers.
    """
    from deepspeed.runtime.zero import partition_parameters

    for handle in (partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle):
        handle.__init__ = _copying(handle.__init__)


def _copying(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, params: Any) -> None:
        plain(self, params)
        several: list[Any] = [params] if isinstance(params, torch.nn.Parameter) else list(params)
        for parameter in several:
            if parameter.nvme_swapper is not None:
                parameter.data = parameter.data.clone()

    return init


@cache
def swap_in_own_dtype() -> None:
    """Let `zero.Init` heed the dtype it is given, as for weights that were made outside of it.

    `_set_dtype` reads `dtype or torch.float16 if ... else torch.bfloat16`, which is `(dtype or torch.float16) if ...`:
    where fp16 isn't supported, as on the CPU, it ignores `dtype`, and fp32 weights would be read from disk as bf16.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Init

    plain = Init._set_dtype

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        plain(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    Init._set_dtype = set_dtype


# --- checkpoints ----------------------------------------------------------------------------------------------------

_OWN_KEYS = {
    *("buffer_names", "checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_config", "ds_version"),
    *("frozen_param_fragments", "frozen_param_shapes", "global_samples", "global_steps", "lr_scheduler", "module"),
    *("mp_world_size", "optimizer", "param_shapes", "random_ltd", "shared_params", "skipped_steps"),
}
"""Keys that DeepSpeed 0.19 adds to the file that also holds what Lightning saves."""

_CONVERTED = {"exp_avg", "exp_avg_sq", "step"}
"""States that `ds_to_universal` of DeepSpeed 0.19 converts; it passes over others without a word."""


class ZeroFolder:
    """A checkpoint folder that DeepSpeed wrote: a file of the optimizer for each rank, and files of the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = (folder / ZERO_MARK).read_text().strip()
        inside = folder / self.tag
        # The names of the optimizers' files begin otherwise in bf16.
        self.optimizer_files = sorted(inside.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank_of)
        if not self.optimizer_files:
            raise ValueError(f"`ckpt_path={str(folder)!r}` holds no files of an optimizer under ZeRO.")
        models = sorted(inside.glob("*zero_pp_rank_*_model_states.pt"), key=_rank_of)
        self.model_files = models or [inside / "mp_rank_00_model_states.pt"]

    @property
    def is_partitioned(self) -> bool:
        """Whether stage 3 wrote it."""
        return "zero_pp_rank" in self.model_files[0].name

    def model(self, number: int = 0) -> dict[str, Any]:
        """What a file of the module holds; tensors stay on disk."""
        return _load(self.model_files[number])

    def whole(self) -> dict[str, Any]:
        """Weights, from the optimizer's fp32 master weights, put together in memory, and what Lightning saved."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        model = self.model()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            weights: dict[str, Any] = dict(get_fp32_state_dict_from_zero_checkpoint(str(self.folder), self.tag))
        entries = model["module"].items()
        weights |= {name: value for name, value in entries if name.rpartition(".")[2] == _EXTRA_STATE}
        if not self.is_partitioned:  # also what no optimizer group had
            weights |= {name: _widened(value) for name, value in entries if name not in weights}
        return {key: value for key, value in model.items() if key not in _OWN_KEYS} | {"state_dict": weights}


def _rank_of(path: Path) -> int:
    return int(path.name.partition("zero_pp_rank_")[2].partition("_")[0])


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)  # nosec B614  # by callers
    return loaded


def _widened(value: Any) -> Any:
    """What a run in half precision keeps, in float32 as the master weights are; float64 stays."""
    return value.float() if torch.is_tensor(value) and value.dtype in (torch.float16, torch.bfloat16) else value


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


def gather_states_from_disk(engine: Any, folder: Path) -> None:
    """Put states that lie in files of the optimizer's swapper into this rank's file of a checkpoint.

    DeepSpeed saves empty tensors in their place and copies the files, which it doesn't find again: they are named by
    numbers of tensors that differ from process to process. The tensors are mapped, so that memory doesn't hold them.
    """
    gathered_values(None)  # all have written
    zero, saved = engine.optimizer, ZeroFolder(folder)
    rank = torch.distributed.get_rank()
    path, files = saved.optimizer_files[rank], folder / saved.tag / "offloaded_tensors" / f"rank{rank:02d}"
    with without_code(folder):
        states = _load(path)
    held = states["optimizer_state_dict"]
    for number, numel in enumerate(map(int, zero.fp16_partitioned_groups_flat_numel)):
        name = zero.fp32_partitioned_groups_flat[number].ds_id
        if not held["fp32_flat_groups"][number].numel() and numel:
            held["fp32_flat_groups"][number] = _mapped(files / f"{name}.tensor.swp", numel)
        for key, value in held["optimizer_state_dict"]["state"].get(number, {}).items():
            if torch.is_tensor(value) and value.dim() and not value.numel() and numel:
                held["optimizer_state_dict"]["state"][number][key] = _mapped(files / f"{key}-{name}.tensor.swp", numel)
    beside = path.with_suffix(".new")
    torch.save(states, beside)
    beside.replace(path)
    shutil.rmtree(files)
    with suppress(OSError):  # the last rank leaves it empty
        files.parent.rmdir()


def _mapped(path: Path, numel: int) -> Tensor:
    return torch.from_file(str(path), size=numel, dtype=torch.float32)


def load_run(engine: Any, path: Path, strict: bool, is_on_disk: bool) -> tuple[dict[str, Any], int]:
    """Give an engine that trains the weights, states and groups of a folder, as DeepSpeed does.

    Where the ranks divide states otherwise than those that wrote it, the first rank converts the folder, beside it, by
    DeepSpeed's `ds_to_universal`, and all ranks load that.

    Returns:
        What Lightning, callbacks and the module saved besides, and the number of ranks that wrote it.

    Raises:
        ValueError: If the folder is of another kind of stage, the optimizer's groups are others, or its states can't be
            divided otherwise.
    """
    saved, is_partitioned = ZeroFolder(path), engine.zero_optimization_partition_weights()
    if saved.is_partitioned != is_partitioned:
        wrote, runs = ("3", "1 and 2") if saved.is_partitioned else ("1 or 2", "3")
        raise ValueError(
            f"`ckpt_path={str(path)!r}` was written by ZeRO stage {wrote}, whose optimizer states stage {runs} can't "
            "load. Resume with that stage, or start a new optimizer from the weights alone (`load_full_weights: true`, "
            "`memfit export`)."
        )
    model, world_size = saved.model(), len(saved.optimizer_files)
    shapes, live = model["param_shapes"], engine._get_zero_param_shapes()
    groups = [[name for group in one for name in group] for one in (shapes, live)]
    check_stepped(path, *([names] for names in groups))
    if not is_partitioned:
        check_stepped(path, *(one for one in (shapes, live)))
    check_shapes(path, {name: shape for group in shapes for name, shape in group.items()}, engine.module)
    is_divided_alike = world_size == torch.distributed.get_world_size() and list(map(list, shapes)) == list(
        map(list, live)
    )
    if is_on_disk:
        if not is_divided_alike:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` was saved on {world_size} ranks, and states on disk can't be divided among "
                "others. Resume on as many with the same sizes, or start a new optimizer from the weights alone "
                "(`load_full_weights: true`)."
            )
        _load_to_disk(engine, saved)
    elif is_divided_alike:
        engine.load_checkpoint(str(path), load_lr_scheduler_states=False, load_module_strict=strict)
        if not is_partitioned:  # the folder may have weights by other names, as adapters have them: masters are right
            engine.optimizer.update_lp_params()
    else:
        _load_converted(engine, saved)
    _load_rest(engine, saved)
    for key in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, key, model[key])
    return {key: value for key, value in model.items() if key not in _OWN_KEYS}, world_size


def _load_converted(engine: Any, saved: ZeroFolder) -> None:
    """Load a folder that other numbers of ranks, or other sizes of sub-groups, have divided."""
    from deepspeed.checkpoint import ds_to_universal

    held, is_partitioned = _load(saved.optimizer_files[0])["optimizer_state_dict"], saved.is_partitioned
    base = held["optimizer_state_dict" if is_partitioned else "base_optimizer_state"]
    kinds = {frozenset(state) for state in base["state"].values()} or {frozenset[str]()}
    if any(not kind <= _CONVERTED or len(kind) < len(_CONVERTED) for kind in kinds):
        raise ValueError(
            f"`ckpt_path={str(saved.folder)!r}` was saved on {len(saved.optimizer_files)} ranks with an optimizer that "
            "is not Adam or AdamW, whose states alone DeepSpeed divides otherwise. Resume on as many ranks with the "
            "same sizes, or start a new optimizer from the weights alone (`load_full_weights: true`, `memfit export`)."
        )
    target = saved.folder.with_name(f"{saved.folder.name}.universal")
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        remove(target)
        target.mkdir()
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": str(saved.folder / saved.tag), "output_folder": str(target / saved.tag)}
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ds_to_universal.main(Namespace(**options, **folders, inject_missing_state=True))
    try:
        gathered_values(None)
        if not is_partitioned:
            engine.module.load_state_dict(saved.model()["module"], strict=False)
        engine.load_universal_checkpoint = lambda: True
        engine.load_checkpoint(str(target), load_lr_scheduler_states=False)
        if is_partitioned:
            # DeepSpeed 0.19.8 gives every group the options of the first one, and all states one tensor of the step.
            for group, kept in zip(engine.optimizer.optimizer.param_groups, base["param_groups"], strict=True):
                group.update({key: value for key, value in kept.items() if key != "params"})
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone() if torch.is_tensor(state["step"]) else state["step"]
    finally:
        vars(engine).pop("load_universal_checkpoint", None)
        gathered_values(None)
        if is_first:
            remove(target)


@torch.no_grad()
def _load_to_disk(engine: Any, saved: ZeroFolder) -> None:
    """Give an engine whose states or parameters lie on disk this rank's file, one sub-group after the other.

    DeepSpeed 0.19.8 resumes with zeroed moments where states lie on disk, and fails where parameters alone do.
    """
    zero = engine.optimizer
    held = _load(saved.optimizer_files[torch.distributed.get_rank()])["optimizer_state_dict"]
    base = held["optimizer_state_dict"]
    zero.checkpoint_event_prologue()
    for number, master in enumerate(zero.fp32_partitioned_groups_flat):
        is_swapped = zero._swappable_optimizer_subgroup(number)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_in(number)
        master.copy_(held["fp32_flat_groups"][number])
        zero.optimizer.state[master] = {
            key: value.to(master.device if value.dim() else "cpu", copy=True) if torch.is_tensor(value) else value
            for key, value in base["state"].get(number, {}).items()
        }
        zero._reassign_or_swap_out_partitioned_parameters(number)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_out(number)
    for group, kept in zip(zero.optimizer.param_groups, base["param_groups"], strict=True):
        group.update({key: value for key, value in kept.items() if key != "params"})
    if len(zero.persistent_parameters) > 0:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    zero.checkpoint_event_epilogue()
    if held.get("dynamic_loss_scale") and zero.dynamic_loss_scale:
        zero.loss_scaler = held["loss_scaler"]


@torch.no_grad()
def _load_rest(engine: Any, saved: ZeroFolder) -> None:
    """Load what stage 3 doesn't: parameters that no optimizer group has; and buffers of a converted folder."""
    if not saved.is_partitioned:
        return
    models = [saved.model(number) for number in range(len(saved.model_files))]
    take_buffers(engine.module, models[0]["module"])
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    for parameter, name in _not_stepped(engine):
        if name in fragments[0]:
            flat = torch.cat([one[name].reshape(-1) for one in fragments])[: parameter.ds_numel]
            own = flat[parameter.ds_tensor.numel() * torch.distributed.get_rank(parameter.ds_process_group) :]
            part = parameter.ds_tensor.view(-1)
            part[: own.numel()].copy_(own[: part.numel()])


@torch.no_grad()
def take_buffers(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Give a module on every rank the buffers and extra states among what a checkpoint has."""
    for name, buffer in module.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])
    for name, value in weights.items():
        prefix, _, last = name.rpartition(".")
        if last == _EXTRA_STATE:
            module.get_submodule(prefix).set_extra_state(value)


_EXTRA_STATE = "_extra_state"
"""Last part of the name under which a state dict has what `get_extra_state` gave."""


def check_shapes(path: str | Path, saved: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Refuse a checkpoint with weights of other shapes than the module's, which ZeRO may have divided."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        if name in saved and tuple(saved[name]) != shape:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has {name!r} of shape {tuple(saved[name])}, this run's module of {shape}. "
                "Build the module as the saved run did."
            )


@torch.no_grad()
def renew_masters(engine: Any, weights: Mapping[str, Any]) -> None:
    """Give the optimizer's fp32 master weights the values of weights that an engine of stage 3 has just loaded."""
    from deepspeed.utils import safe_set_full_fp32_param

    for parameter in stepped_by(engine):
        if (name := engine.param_names[parameter]) in weights:
            safe_set_full_fp32_param(parameter, weights[name].to(engine.device, torch.float32))
