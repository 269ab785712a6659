"""Private names of upstream's that the package uses: where each is found, and the version it was written for.

`python -m tests.upstream_names` prints them as tables. `tests/truth/test_upstream_names.py` fails when the package uses
a name that is not in `NAMES`, or when a name has moved.
"""

import ast
import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

VERSIONS = {
    "bitsandbytes": "0.50",
    "datasets": "4",
    "deepspeed": "0.19.8",
    "diffusers": "0.35",
    "jsonargparse": "4.53",
    "lightning": "2.6",
    "python": "3.10-3.13",
    "torch": "2.11-2.13",
    "torchao": "0.18",
    "torchmetrics": "1.9",
    "transformers": "5.10",
}

# The module or class that an attribute belongs to, which the expressions of the package don't tell. Names that are
# imported need no line: their import path says where they are.
NAMES: dict[str, str] = {
    "_no_grad_trunc_normal_": "torch.nn.init",
    "_swap_out_offload_fp32_gradients": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_restore_cpu_offload_grad_to_gpu": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "_register_pre_backward_hook": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_offload_grad_partition_at_boundary": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_epilogue_ran_this_backward": "deepspeed.runtime.base_optimizer.ZeROOptimizer",
    "_offload_accumulated_param_ids": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "_get_zero_frozen_param_attributes": "deepspeed.DeepSpeedEngine",
    "_remove_autograd_hooks": "torch.nn.parallel.DistributedDataParallel",
    "_reset_parameters": "torch.nn.Transformer",
    "_get_zero_param_shapes": "deepspeed.DeepSpeedEngine",
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_C": "torch",
    "_ExcludeDispatchKeyGuard": "torch._C",
    "_VF": "torch",
    "_pack_padded_sequence": "torch",
    "_accelerator_connector": "lightning.pytorch.Trainer",
    "_actions": "argparse.ArgumentParser",
    "_average_model": "lightning.pytorch.callbacks.EMAWeightAveraging",
    "_logger_connector": "lightning.pytorch.Trainer",
    "_attn_implementation": "transformers.PreTrainedConfig",
    "_autograd": "torch._C",
    "_backward_hooks": "torch.nn.Module",
    "_base": "torch.Tensor",
    "_buffers": "torch.nn.Module",
    "_checkpoint_connector": "lightning.pytorch.Trainer",
    "_loaded_checkpoint": "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector",
    "_call_callback_hooks": "lightning.pytorch.trainer.call",
    "_call_lightning_module_hook": "lightning.pytorch.trainer.call",
    "_call_strategy_hook": "lightning.pytorch.trainer.call",
    "_cache_key": "torch._subclasses.fake_tensor.FakeTensorMode",
    "_cdata": "torch.UntypedStorage",
    "_get_default_device": "torch._C",
    "_cudnn_rnn": "torch.ops.aten",
    "_cudnn_rnn_backward": "torch.ops.aten",
    "_data_fetcher": "lightning.pytorch.loops.fit_loop._FitLoop",
    "_should_check_val_fx": "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
    "_restarting": "lightning.pytorch.loops.loop._Loop",
    "_compiled_call_impl": "torch.nn.Module",
    "_orig_mod": "torch._dynamo.OptimizedModule",
    "_computed": "torchmetrics.Metric",
    "_tensor_parallel_size": "lightning.pytorch.strategies.ModelParallelStrategy",
    "_configure_launcher": "lightning.pytorch.strategies.Strategy",
    "_set_dtype": "deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses",
    "_config_initialized": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_cuda_isHistoryEnabled": "torch._C",
    "_current_fx_name": "lightning.pytorch.LightningModule",
    "_count_flops": "torch.utils.flop_counter.FlopCounterMode",
    "_current_graph_task_id": "torch._C",
    "_data_source": "lightning.pytorch.loops.fit_loop._FitLoop",
    "_ddp_comm_hook": "lightning.pytorch.strategies.DDPStrategy",
    "_ddp_kwargs": "lightning.pytorch.strategies.DDPStrategy",
    "_dtype": "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin",
    "_defaults": "torchmetrics.Metric",
    "_destroy": "torch.library.Library",
    "_dump_snapshot": "torch.cuda.memory",
    "_extract_batch_size": "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection",
    "_chunk_cat": "torch",
    "_fingerprint": "datasets.Dataset",
    "_foreach_mul_": "torch",
    "_foreach_supported_types": "torch.optim.optimizer",
    "_compute_groups_create_state_ref": "torchmetrics.MetricCollection",
    "_groups_checked": "torchmetrics.MetricCollection",
    "_merge_compute_groups": "torchmetrics.MetricCollection",
    "_state_is_copy": "torchmetrics.MetricCollection",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_from_config": "transformers.PreTrainedModel",
    "_keep_in_fp32_modules": "diffusers.ModelMixin",
    "_initialize_weights": "transformers.PreTrainedModel",
    "_unsafe_preserve_version_counter": "torch.autograd",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_orig_size": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_contiguous_orig_stride": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_foreach_copy_": "torch",
    "_to_unsharded": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_to_sharded": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_to_sharded_post_forward": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_layer_sync": "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
    "_lazy_init": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_training_state": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_wait_all_gather_streams_on_event": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_fsdp_param_groups": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_gen_transform_infos": "torch.distributed.tensor._redistribute",
    "_get_ddp_logging_data": "torch.nn.parallel.DistributedDataParallel",
    "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "_is_root": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "_get_foreach_kernels_supported_devices": "torch.optim.optimizer",
    "_getframe": "sys",
    "_global_grad_norm": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_grouped_mm": "torch.ops.aten",
    "_guards": "torch",
    "_indices": "torch.Tensor",
    "_init_config_if_needed": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_init_deepspeed_distributed": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_initialize_deepspeed_inference": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_initialize_deepspeed_train": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_is_zerotensor": "torch.Tensor",
    "_load_config": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_local_scalar_dense": "torch.ops.aten",
    "_make_closure": "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_make_zero_grad_fn": "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_on_before_zero_grad": "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_modules": "torch.nn.Module",
    "_name": "ctypes.CDLL",
    "_new_buffer": "torchao.optim.adam._AdamBase",
    "_on_before_batch_transfer": "lightning.pytorch.LightningModule",
    "_opname": "torch._ops.OpOverload",
    "_optimizer_load_state_dict_post_hooks": "torch.optim.Optimizer",
    "_optimizer_load_state_dict_pre_hooks": "torch.optim.Optimizer",
    "_optimizer_step": "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_optimizer_step_post_hooks": "torch.optim.Optimizer",
    "_optimizer_step_pre_hooks": "torch.optim.Optimizer",
    "_overloadpacket": "torch._ops.OpOverload",
    "_parameters": "torch.nn.Module",
    "_load_from_state_dict": "torch.nn.Module",
    "_save_to_state_dict": "torch.nn.Module",
    "_parse_ckpt_path": "lightning.pytorch.cli.LightningCLI",
    "_optimizer_states_and_gradient_swap_in": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_optimizer_states_and_gradient_swap_out": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_partition_all_parameters": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_per_optimizer_states": "torch.amp.GradScaler",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_swap_tensor_impl": "torch._C",
    "_World": "torch.distributed.distributed_c10d",
    "_world": "torch.distributed.distributed_c10d",
    "_profiler_enabled": "torch._C._autograd",
    "_reassign_or_swap_out_partitioned_parameters": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_propagate_tensor_meta_non_cached": "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "_record_memory_history": "torch.cuda.memory",
    "_restore_zero_state": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_results": "lightning.pytorch.Trainer",
    "_safe_softmax": "torch.ops.aten",
    "_scaled_dot_product_attention_math": "torch.ops.aten",
    "_scaled_dot_product_cudnn_attention": "torch.ops.aten",
    "_scaled_dot_product_cudnn_attention_backward": "torch.ops.aten",
    "_scaled_dot_product_efficient_attention": "torch.ops.aten",
    "_scaled_dot_product_efficient_attention_backward": "torch.ops.aten",
    "_scaled_dot_product_flash_attention": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_backward": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch.ops.aten",
    "_schema": "torch._ops.OpOverload",
    "_setup_model_and_optimizer": "lightning.pytorch.strategies.DeepSpeedStrategy",
    "_should_accumulate": "lightning.pytorch.loops.fit_loop._FitLoop",
    "_step_supports_amp_scaling": "torch.optim.Adam",
    "_step_fn": "lightning.pytorch.loops.optimization.automatic.Closure",
    "_swappable_optimizer_subgroup": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_to_copy": "torch.ops.aten",
    "_to_sync": "torchmetrics.Metric",
    "_trainer": "lightning.pytorch.LightningModule",
    "_unique2": "torch.ops.aten",
    "_unsafe_view": "torch.ops.aten",
    "_unsharded_param": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "_version": "torch.Tensor",
    "_metadata": "torch.nn.Module",
    "_wrapped_by_lr_sched": "torch.optim.lr_scheduler",
}


# Written by us on others' objects, of ours in another folder, or documented by Python in spite of the underscore.
_NOT_UPSTREAM = ("_", "_exit", "_fields", "_make", "_replace")


@cache
def own_sources() -> dict[str, ast.Module]:
    """Every file of the package by its path as the documentation names it: `fitting/auto.py`, `cli/fit.py`."""
    package = ROOT / "lightning_memfit"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files |= {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "cli").rglob("*.py")}
    return {name: ast.parse(path.read_text()) for name, path in sorted(files.items())}


@cache
def used_names() -> dict[str, set[str]]:
    """Private names of upstream's, and the files that use them.

    Imported ones are import paths. Attributes are bare names: those of what upstream's modules export, those of `self`
    that the package defines nowhere, and those of other objects that the file's folder doesn't define.
    """
    sources = own_sources()
    defined: dict[str, set[str]] = defaultdict(set)
    for file, tree in sources.items():
        defined[file.rpartition("/")[0]] |= set(_defined(tree))
    everywhere = set().union(*defined.values())
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in sources.items():
        imported = dict(_imported(tree))
        for path in imported.values():
            if any(map(_is_private, path.split("."))):
                found[path].add(file)
        nearby = defined[file.rpartition("/")[0]]
        for name in _accessed(tree, set(imported), nearby, everywhere):
            found[name].add(file)
    return dict(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_memfit")) and name not in _NOT_UPSTREAM


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a file gives to what is its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # A method that overrides upstream's is upstream's name, too.
            overrides = any(ast.unparse(decorator) == "override" for decorator in node.decorator_list)
            if not overrides:
                yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local names and import paths of what comes from upstream."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in VERSIONS:
                    yield (alias.asname or alias.name.partition(".")[0]), alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in VERSIONS:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


_TAKE_A_NAME = ("getattr", "setattr", "hasattr", "delattr", "wrap_method")


def _accessed(tree: ast.Module, imported: set[str], nearby: set[str], everywhere: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _is_self(node.value):
                is_upstream = node.attr not in everywhere
            else:
                is_upstream = _root(node.value) in imported or node.attr not in nearby
            if is_upstream:
                yield node.attr
        elif isinstance(node, ast.FunctionDef) and _is_private(node.name) and node.name not in everywhere:
            yield node.name  # overrides a method of upstream's
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _TAKE_A_NAME:
            for value in node.args[1:2]:
                if isinstance(value, ast.Constant) and _is_private(str(value.value)) and value.value not in nearby:
                    yield str(value.value)


def _is_self(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None


def owner_of(path: str) -> Any:
    """The module or class that a path names.

    Raises:
        AttributeError: If there is none.
        ModuleNotFoundError: If the library is not installed.
    """
    parent, _, name = path.rpartition(".")
    if not parent:
        return import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        return import_module(path)  # modules first: torch.optim deletes its attribute `optimizer`
    return getattr(owner_of(parent), name)


def exists(path: str) -> bool:
    """Whether a name is where its path says: an attribute, or one that a class's or module's source assigns."""
    owner_path, _, name = path.rpartition(".")
    owner = owner_of(owner_path)
    if hasattr(owner, name):
        return True
    sources = [cls for cls in inspect.getmro(owner) if cls is not object] if inspect.isclass(owner) else [owner]
    return any(re.search(rf"\.{name}\b[^=\n]*=[^=]", inspect.getsource(source)) for source in sources)


def paths() -> dict[str, set[str]]:
    """Where each name is found, and the files that use it.

    Raises:
        KeyError: If the package uses a name that `NAMES` lacks.
    """
    return {name if "." in name else f"{NAMES[name]}.{name}": files for name, files in used_names().items()}


def library_of(path: str) -> str:
    """The key of `VERSIONS` that a path belongs to."""
    library = path.partition(".")[0]
    return library if library in VERSIONS else "python"


def tables() -> str:
    """What is used of each library, and where, in Markdown."""
    rows: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for path, files in paths().items():
        rows[library_of(path)][path] = files
    lines: list[str] = []
    for library in sorted(rows):
        lines += [f"{library} {VERSIONS[library]} ({len(rows[library])}):", "", "| name | used in |", "|---|---|"]
        for path, files in sorted(rows[library].items()):
            lines.append(f"| `{path}` | {', '.join(f'`{file}`' for file in sorted(files))} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
