"""`DataParallelStrategy`: Lightning's DDP with settings that avoid wasting memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memfit.memory.collectives import broadcast_from_first
from lightning_memfit.memory.kind import synchronize
from lightning_memfit.memory.replicas import is_summed_by_loop
from lightning_memfit.strategies.integrity import CheckpointError, is_sharded
from lightning_memfit.strategies.launched import EqualBatches
from lightning_memfit.strategies.saved_names import listed, without_other_states
from lightning_memfit.strategies.sequence_parallel import DividesSequences

_NOT_AVERAGED = (
    "`{0}` was frozen, or was not there, when this step began, and has a gradient now: DDP doesn't average it over the "
    "ranks, whose weights would drift apart. Unfreeze or add it before the step, in `on_train_batch_start` or another "
    "hook, or before `fit`."
)


class DataParallelStrategy(DividesSequences, EqualBatches, DDPStrategy):
    """A whole copy of the model on every device; gradients are averaged while they are computed.

    Gradients are views of the communication buckets, which saves one copy of all gradients over Lightning's default.
    Hooks may freeze, unfreeze and add weights: DDP wraps the module anew when its buckets lack one that is trained.
    With `find_unused_parameters=True`, `training_step` may freeze and unfreeze them as well, and what is frozen keeps
    its place in the buckets.

    Args:
        gradient_as_bucket_view: Keep gradients inside the buckets.
        static_graph: Tell DDP that the same parameters take part in every step, which it can use; needed for
            reentrant checkpointing.
        find_unused_parameters: Search the graph in every step for parameters that take no part.
        bucket_cap_mb: Size of a bucket in MiB.
        sequence_parallel_size: Number of neighbouring ranks that share every sequence, each with a part of its tokens.
        options: Further arguments of `DDPStrategy`.
    """

    strategy_name = "memfit_ddp"

    def __init__(
        self,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        sequence_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
        self.sequence_parallel_size = sequence_parallel_size
        self._known: dict[int, torch.Tensor] = {}
        self._averaged: list[torch.Tensor] = []
        self._apart: list[torch.Tensor] = []
        self._left: list[bool] = []
        """Which of those that are averaged were trained when the last step had returned its loss."""

    def _names(self, weights: Iterable[torch.Tensor]) -> list[str]:
        """Names of those that the module has, in the order in which they are given."""
        assert self.lightning_module is not None
        names = {id(one): name for name, one in self.lightning_module.named_parameters()}
        return [names[id(one)] for one in weights if id(one) in names]

    @override
    def waiting_ranks(self, evaluates: bool) -> int | None:
        """Ranks evaluate by themselves."""
        return 1 if evaluates else None

    # --- which gradients are averaged -------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step in a DDP whose buckets have the parameters that are trained now."""
        self._wrap_anew_if_trained_change()
        result = super().training_step(*args, **kwargs)
        self._left = [one.requires_grad for one in self._averaged]
        return result

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Refuse to go on with gradients that are this rank's alone.

        Raises:
            MisconfigurationException: If `training_step` itself has unfrozen or added a weight that is in no bucket.
        """
        super().post_backward(closure_loss)
        wrapped = self.model
        if self.world_size == 1:
            return
        apart: Iterable[torch.Tensor] = chain(self._apart, self._added())
        if isinstance(wrapped, DistributedDataParallel) and is_summed_by_loop(wrapped):
            apart = self._added()  # has values of this rank's own; everything else is summed
        elif not getattr(wrapped, "require_backward_grad_sync", False):
            return  # it will be, in a later pass, or by who keeps DDP from doing so
        lost = [one for one in apart if one.requires_grad and one.grad is not None]
        if lost:
            stepped = {id(one) for one in self._stepped()}
            names = self._names(one for one in lost if id(one) in stepped)
            if names:
                raise MisconfigurationException(_NOT_AVERAGED.format(names[0]))

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward reduce nothing, also in a DDP that wraps the module anew meanwhile."""
        if not isinstance(self.model, DistributedDataParallel):
            yield
            return
        before, self.model.require_backward_grad_sync = self.model.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.model.require_backward_grad_sync = before

    @override
    def configure_ddp(self) -> None:
        """Wrap the module, and note which parameters are averaged in it."""
        super().configure_ddp()
        assert self.lightning_module is not None
        self._note(list(self.lightning_module.parameters()))

    def _note(self, known: list[torch.nn.Parameter]) -> None:
        self._known = {id(one): one for one in known}  # which keeps them, so that no other gets the same `id`
        self._averaged = [one for one in known if one.requires_grad]
        self._apart = [one for one in known if not one.requires_grad]
        self._left = [True] * len(self._averaged)

    def _stepped(self) -> Iterator[torch.Tensor]:
        return (one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"])

    def _added(self) -> list[torch.Tensor]:
        """What optimizers have been given since the module was wrapped."""
        return [one for one in self._stepped() if id(one) not in self._known]

    def share_added(self) -> None:
        """Give all ranks the first one's values of added layers, as DDP does for those that it wraps.

        For a loop that sums gradients itself (`sum_by_loop`), before it notes what a failed step goes back to: else
        that would be values of this rank's own.
        """
        added = self._added()
        broadcast_from_first(added)
        self._known.update((id(one), one) for one in added)

    def _wrap_anew_if_trained_change(self) -> None:
        """Wrap the module anew if its buckets lack a weight that is trained, or wait for one that a hook has frozen.

        A layer that was added counts once an optimizer steps it; until then nobody needs its gradients. What
        `training_step` itself freezes is for DDP to find: it comes back in a later step.
        """
        wrapped, module = self.model, self.lightning_module
        if not isinstance(wrapped, DistributedDataParallel) or module is None:
            return
        if is_summed_by_loop(wrapped):
            return
        added = self._added()
        looks_for_unused = bool(self._ddp_kwargs.get("find_unused_parameters"))
        changed = [one for one in chain(self._apart, added) if one.requires_grad]
        if not looks_for_unused:
            left = zip(self._averaged, self._left, strict=True)
            changed += [one for one, was_trained in left if was_trained and not one.requires_grad]
        names = self._names(changed) if changed else []
        self._known.update((id(one), one) for one in added)
        self._apart += [one for one in added if not one.requires_grad]
        if names:
            rank_zero_info(
                f"{type(self).__name__}: DDP wraps the module anew, as weights were frozen, unfrozen or added: "
                f"{listed(names)}."
            )
            kept = {id(one) for one in self._averaged} if looks_for_unused else set()
            self._wrap_anew(wrapped, module, kept)

    def _wrap_anew(self, wrapped: DistributedDataParallel, module: torch.nn.Module, kept: set[int]) -> None:
        """Wrap what is trained now, and what is kept in the buckets though it is frozen."""
        known = [one for one in module.parameters() if id(one) in self._known]
        before = [(one, one.requires_grad) for one in module.parameters()]
        synchronize(self.root_device)  # it copies weights in a stream of its own
        wrapped._remove_autograd_hooks()
        self.model = module
        try:
            for one, is_trained in before:
                _set_trained(one, id(one) in self._known and (is_trained or id(one) in kept))
            self.configure_ddp()
            self._note(known)
        finally:
            for one, is_trained in before:
                _set_trained(one, is_trained)
        new: Any = self.model
        new.require_backward_grad_sync = wrapped.require_backward_grad_sync
        new.require_forward_param_sync = wrapped.require_forward_param_sync
        self._pl_static_graph_delay_done = False
        synchronize(self.root_device)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file; to evaluate, also the weights of a sharded strategy's folder, put together in host memory."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and is_sharded(checkpoint_path):
            raise CheckpointError(without_other_states(checkpoint_path, f"`strategy={self.strategy_name}`"))
        return super().load_checkpoint(checkpoint_path, weights_only)


def _set_trained(parameter: torch.Tensor, is_trained: bool) -> None:
    if parameter.requires_grad != is_trained:
        parameter.requires_grad_(is_trained)
