"""`FullyShardedStrategy`: FSDP2 for any module and tensor parallelism, after everything that changes the blocks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.checkpointing.blocks import find_blocks, select_blocks
from lightning_memfit.memory.collectives import broadcast_from_first
from lightning_memfit.strategies.integrity import FSDP2_MARK, CheckpointError, replacing_folder, verify
from lightning_memfit.strategies.launched import (
    DIVIDED,
    STOCHASTIC_AVERAGES,
    EqualBatches,
    check_optimizer,
    is_traced,
    refuse_callbacks,
    synchronize_batch_norms,
)
from lightning_memfit.strategies.saved_names import without_other_states
from lightning_memfit.strategies.sequence_parallel import DividesSequences
from lightning_memfit.strategies.shards import CURRENT, WEIGHTS, load_folder, load_weights
from lightning_memfit.strategies.tensor_parallel import divide_blocks, share_random_state
from lightning_memfit.strategies.upstream.fsdp import GatheredWeights
from lightning_memfit.strategies.upstream.torch import announce_backward, plain

_RUN = "_memfit_step"
"""Attribute of a sharded module: runs a step with what no block holds gathered, whatever the step calls."""


class FullyShardedStrategy(DividesSequences, EqualBatches, ModelParallelStrategy):
    """Shard parameters, gradients and optimizer states with torch's FSDP2; a block is gathered while it computes.

    Lightning's strategy leaves the sharding to the module's `configure_model`. This one shards by itself, after
    `configure_model` and whatever techniques changed there: checkpointing is inside a sharded block, so that the
    recomputation finds the block gathered. A module that has sharded itself is left as it is.

    With `tensor_parallel_size`, that many neighbouring ranks also compute each block together, on one batch: its linear
    layers and their activations are divided, at the price of two sums over these ranks per block and pass. FSDP2 then
    shards over the other ranks, which are the data-parallel ones: an effective batch is micro-batch x accumulation x
    ranks / `tensor_parallel_size`.

    Args:
        sharding_size: Number of ranks among which one copy of the model is divided (hybrid sharding); the gradients of
            the copies are averaged. With the ranks of one machine, gathering stays within machines. By default all
            ranks. It must be a multiple of `tensor_parallel_size`.
        reshard_after_forward: False keeps blocks gathered until their backward: more memory, less communication.
        blocks: Class name or dotted names of the units to shard; by default repeated blocks are found.
        tensor_parallel_size: Number of ranks that compute a block of GPT-2's together. It must divide their heads;
            choose devices of one machine.
        process_group_backend: Backend of `torch.distributed`; by default nccl on CUDA, gloo on the CPU.
        timeout: How long a collective waits.
        gather_dtype: Name of the dtype, such as `bfloat16`, to gather weights in and compute with; shards, reduced
            gradients and states keep theirs. Without it, autocast (`bf16-mixed`) keeps a half-precision copy of every
            weight of the model for backward, on every rank.
        sequence_parallel_size: Number of neighbouring ranks that share every sequence, each with a part of its tokens;
            weights are sharded over all ranks as without. Not together with `tensor_parallel_size`.

    Raises:
        ValueError: If `gather_dtype` names no floating-point dtype, or both kinds of parallelism are asked for.
    """

    strategy_name = "memfit_fsdp2"

    def __init__(
        self,
        sharding_size: int | None = None,
        reshard_after_forward: bool = True,
        blocks: str | Sequence[str] | None = None,
        tensor_parallel_size: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        gather_dtype: str | None = None,
        sequence_parallel_size: int = 1,
    ) -> None:
        if tensor_parallel_size > 1 and sequence_parallel_size > 1:
            raise ValueError("Set `tensor_parallel_size` or `sequence_parallel_size`, not both.")
        dtype = None if gather_dtype is None else getattr(torch, gather_dtype, torch.int8)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"`gather_dtype={gather_dtype!r}` is no floating-point dtype: name one, such as bfloat16.")
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sequence_parallel_size = sequence_parallel_size
        self.sharding_size = sharding_size
        self.tensor_parallel_size = tensor_parallel_size
        self.reshard_after_forward = reshard_after_forward
        self.blocks = blocks
        self.gather_dtype, self._gathered_as = gather_dtype, dtype
        self._weights: GatheredWeights | None = None
        self._undo: list[Callable[[], None]] = []

    @override
    def setup_environment(self) -> None:
        """Start communication; ranks that don't compute together are data parallel."""
        ranks, together = self.num_processes * self.num_nodes, self.tensor_parallel_size
        for name, size in (("tensor_parallel_size", together), ("sharding_size", self.sharding_size)):
            if size is not None and (size < 1 or ranks % size):
                raise MisconfigurationException(f"`{name}={size}` must divide the {ranks} ranks of the run.")
        if self.sharding_size is not None and self.sharding_size % together:
            raise MisconfigurationException(
                f"`sharding_size={self.sharding_size}` must be a multiple of `tensor_parallel_size={together}`: ranks "
                "that compute together belong to one copy of the model."
            )
        self._data_parallel_size = ranks // together
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Divide and shard the module, then set up as Lightning does."""
        module = self.lightning_module
        assert module is not None
        refuse_callbacks(trainer, self.strategy_name, STOCHASTIC_AVERAGES)
        synchronize_batch_norms(trainer, module)
        is_divided = any(isinstance(child, FSDPModule) for child in module.modules())
        if not is_divided:
            self._start_alike(module)
            self._shard(module)
            self._shard_averages(trainer)
        is_configured = is_overridden("configure_model", module)
        if not is_configured:  # in which Lightning's strategy expects the sharding
            vars(module)["configure_model"] = lambda: None
        super().setup(trainer)
        if not is_configured:
            del vars(module)["configure_model"]
        if isinstance(module, FSDPModule):
            vars(module)[_RUN] = _run
            register_fsdp_forward_method(module, _RUN)
            self._weights = GatheredWeights(module)
        if self.tensor_parallel_size > 1 and not is_traced():
            share_random_state(self._together, self.root_device)

    @override
    def teardown(self) -> None:
        """Leave the module as it was."""
        if self._weights is not None:
            self._weights.detach()
        if self.lightning_module is not None:
            vars(self.lightning_module).pop(_RUN, None)
        while self._undo:
            self._undo.pop()()
        self._weights = None
        super().teardown()

    # --- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, with what no block holds gathered."""
        return self._gathered_in(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, after which hooks find weights in parts, as after a step of training."""
        return self._evaluated(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, after which hooks find weights in parts, as after a step of training."""
        return self._evaluated(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, after which hooks find weights in parts, as after a step of training."""
        return self._evaluated(super().predict_step, *args, **kwargs)

    def _gathered_in(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = vars(self.lightning_module).get(_RUN)
        return step(*args, **kwargs) if run is None else run(step, *args, **kwargs)

    def _evaluated(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self._gathered_in(step, *args, **kwargs)
        self._put_away()
        return result

    @override
    def waiting_ranks(self, evaluates: bool) -> int | None:
        """Copies of the model are trained together, and each evaluates by itself."""
        return self.sharding_size if evaluates else None

    def _put_away(self, *_: Any) -> None:
        if self._weights is not None:
            self._weights.put_away()

    # --- manual optimization ------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Announce a backward pass within a step by hand: FSDP2 learns of others by what the step returns."""
        super().pre_backward(closure_loss)
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization and isinstance(module, FSDPModule):
            announce_backward(module, closure_loss)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let an optimizer, whoever steps it, change weights that are put away, whatever hooks in its closure wrote."""

        def then_put_away(closure: Callable[[], Any]) -> Any:
            result = closure()
            self._put_away()
            return result

        self._put_away()
        own, *given = args
        wrapped = [partial(then_put_away, one) if callable(one) else one for one in given]
        if callable(kwargs.get("closure")):
            kwargs = kwargs | {"closure": partial(then_put_away, kwargs["closure"])}
        return (own, *wrapped), kwargs

    # --- optimizers ---------------------------------------------------------------------------------------------------

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up as Lightning does, and put weights away before and after every step."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_optimizer(optimizer, self.strategy_name, DIVIDED)
            self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.append(optimizer.register_step_post_hook(self._put_away).remove)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder of shards, which replaces an existing one when it is complete."""
        states: dict[str, Any] = {key: checkpoint[key] for key in (WEIGHTS, CURRENT) if key in checkpoint}
        if not self.is_global_zero:  # of several ranks' buffers, torch chooses one each
            states = {k: {n: one for n, one in v.items() if isinstance(one, DTensor)} for k, v in states.items()}
        states |= {f"optimizer_{n}": one for n, one in enumerate(checkpoint.get("optimizer_states", ()))}
        rest = {key: value for key, value in checkpoint.items() if key not in (*states, "optimizer_states")}
        if self.tensor_parallel_size > 1:
            states = apply_to_collection(states, DTensor, plain)
        with replacing_folder(self.broadcast(filepath), FSDP2_MARK) as folder:
            save_in_parts(states, checkpoint_id=folder)
            if self.is_global_zero:
                torch.save(rest, folder / FSDP2_MARK)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of any number of ranks; to evaluate, also the weights of any other checkpoint.

        Raises:
            ValueError: If the optimizers are not those of the run that wrote the checkpoint, or it is no such folder.
        """
        assert self.model is not None
        assert self.lightning_module is not None
        path, strict = self.broadcast(checkpoint_path), self.lightning_module.strict_loading
        if (folder := Path(path)).joinpath(FSDP2_MARK).is_file():
            verify(folder)
            extras = load_folder(folder, self.model, self.optimizers, strict, weights_only)
            if averages_of(self.lightning_module.trainer):  # whose callback begins with the weights that it finds here
                extras.setdefault(WEIGHTS, {name: one.clone() for name, one in self.model.state_dict().items()})
            return extras
        if self.optimizers:
            if "://" not in str(path) and not Path(path).exists():
                verify(path)
            raise CheckpointError(without_other_states(path, f"`strategy={self.strategy_name}`"))
        saved = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return load_weights(path, saved, self.model, strict)

    def _start_alike(self, module: nn.Module) -> None:
        """Give every rank the first one's weights, as DDP does: a shard is cut from what its own rank has."""
        tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta)
        broadcast_from_first(tensors, self.root_device)

    @property
    def _together(self) -> DeviceMesh:
        """Ranks that compute one model together."""
        return self.device_mesh["tensor_parallel"]

    def _shard(self, module: nn.Module) -> None:
        mesh, together = self._meshes()
        divided = f" and {divide_blocks(module, together)}" if self.tensor_parallel_size > 1 else ""
        groups = find_blocks(module) if self.blocks is None else select_blocks(module, self.blocks)
        blocks = list(chain.from_iterable(group.modules for group in groups))
        shared = _sharing_weights(module, blocks)
        alone = [block for block in blocks if id(block) not in shared]
        policy = MixedPrecisionPolicy(self._gathered_as, torch.float32 if self._gathered_as is not None else None)
        for block in alone:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        counts = Counter(group.class_name for group in groups for block in group.modules if id(block) not in shared)
        units = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "the module as a whole"
        rank_zero_info(f"{type(self).__name__}: sharded {units} over mesh {tuple(mesh.shape)}{divided}.")
        if shared:
            rank_zero_info(
                f"{type(self).__name__}: {len(shared)} of {len(blocks)} blocks share weights with others or with the "
                "rest of the module, and are gathered together with it: that takes more memory."
            )

    def _shard_averages(self, trainer: Trainer) -> None:
        """Divide the copies that Lightning's `WeightAveraging` has made as the module is divided, to step part by part.

        Asked for in https://github.com/Lightning-AI/pytorch-lightning/issues/10914.
        """
        for average in averages_of(trainer):
            if self.tensor_parallel_size > 1:
                raise MisconfigurationException(
                    f"`WeightAveraging` under `strategy={self.strategy_name}` needs `tensor_parallel_size=1`."
                )
            self._start_alike(average)
            self._shard(average)

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """Ranks over which FSDP2 shards, and ranks that compute together, as parts of one mesh."""
        if self.sharding_size in (None, self.world_size):
            return self.device_mesh["data_parallel"], self._together
        together = self.tensor_parallel_size
        shape = (self.world_size // self.sharding_size, self.sharding_size // together, together)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard", "together"))
        return mesh["replicate", "shard"], mesh["together"]


def averages_of(trainer: Trainer) -> list[nn.Module]:
    """Copies of the module that Lightning's `WeightAveraging` callbacks keep."""
    callbacks = (one for one in trainer.callbacks if isinstance(one, WeightAveraging))  # type: ignore[attr-defined]
    return [one._average_model.module for one in callbacks if one._average_model is not None]


def _run(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return step(*args, **kwargs)


def _sharing_weights(module: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Blocks, by `id`, with a weight that another block has, too, or the rest of the module.

    FSDP2 gathers a weight with one unit; where another one computes with it, there would be a part of it.
    """
    units, owners, seen = set(map(id, blocks)), defaultdict(set), set()
    waiting = [(module, id(module))]
    while waiting:
        layer, owner = waiting.pop()
        owner = id(layer) if id(layer) in units else owner
        if (id(layer), owner) in seen:
            continue
        seen.add((id(layer), owner))
        for weight in layer.parameters(recurse=False):
            owners[id(weight)].add(owner)
        waiting += [(child, owner) for child in layer.children()]
    return {owner for found in owners.values() if len(found) > 1 for owner in found if owner in units}
