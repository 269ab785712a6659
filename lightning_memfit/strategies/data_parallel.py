"""`DataParallelStrategy`: Lightning's DDP with settings that avoid wasting memory."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memfit.memory.kind import synchronize
from lightning_memfit.strategies.checkpoint_io import use_atomic_checkpoints
from lightning_memfit.strategies.checkpoints import read_run
from lightning_memfit.strategies.integrity import verify
from lightning_memfit.strategies.launched import check_num_nodes
from lightning_memfit.strategies.saved_run import PARAMETERS, SavedRun, group_names, listed, parameter_names

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_UNUSED = (
    "Parameters that are trained take no part in the loss of every step{}, so that their gradients are never complete. "
    "If that is meant, let DDP look for them in every step: `DataParallelStrategy(find_unused_parameters=True)`; in a "
    "recipe `strategy: {{class_path: lightning_memfit.strategies.DataParallelStrategy, init_args: "
    "{{find_unused_parameters: true}}}}`. Else freeze them (`requires_grad_(False)`)."
)


class DataParallelStrategy(DDPStrategy):
    """A whole copy of the model on every device; gradients are averaged while they are computed.

    Gradients are views of the communication buckets, which saves one copy of all gradients over Lightning's default.

    Args:
        gradient_as_bucket_view: Keep gradients inside the buckets.
        static_graph: Tell DDP that the same parameters take part in every step, which it can use; needed for
            reentrant checkpointing.
        find_unused_parameters: Search the graph in every step for parameters that take no part.
        bucket_cap_mb: Size of a bucket in MiB.
        options: Further arguments of `DDPStrategy`.
    """

    strategy_name = "memfit_ddp"

    def __init__(
        self,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        **options: Any,
    ) -> None:
        super().__init__(
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
        self._loaded: SavedRun | None = None
        self._wrapped: list[tuple[torch.nn.Parameter, bool]] = []

    @override
    def _configure_launcher(self) -> None:
        check_num_nodes(self.cluster_environment, self.num_processes, self.num_nodes)
        super()._configure_launcher()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Say which parameters take no part in the loss, and how this strategy allows it; Lightning names its own."""
        if any(isinstance(one, str) and _UNFINISHED in one for one in exception.args):
            exception.args = (_UNUSED.format(self._named(_INDICES.search(str(exception)))),)

    def _named(self, found: re.Match[str] | None) -> str:
        """Names of the parameters that DDP has counted among those in training, in parentheses."""
        if found is None or self.lightning_module is None:
            return ""
        trained = [name for name, parameter in self.lightning_module.named_parameters() if parameter.requires_grad]
        names = [trained[index] for index in map(int, found[1].split()) if index < len(trained)]
        return f" ({listed(names)})" if names else ""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step in a DDP that has the parameters of now: its buckets are made for those that are trained."""
        self._wrap_anew_if_trained_change()
        return super().training_step(*args, **kwargs)

    @override
    def configure_ddp(self) -> None:
        """Wrap the module, and note which parameters are trained in it."""
        super().configure_ddp()
        assert self.lightning_module is not None
        self._wrapped = [(one, one.requires_grad) for one in self.lightning_module.parameters()]

    def _wrap_anew_if_trained_change(self) -> None:
        """Wrap the module anew if a hook has frozen or unfrozen weights, whose gradients DDP wouldn't average."""
        wrapped, module = self.model, self.lightning_module
        if not isinstance(wrapped, DistributedDataParallel) or module is None:
            return
        changed = {id(one) for one, was_trained in self._wrapped if one.requires_grad != was_trained}
        if not changed:
            return
        names = [name for name, parameter in module.named_parameters() if id(parameter) in changed]
        rank_zero_info(
            f"{type(self).__name__}: DDP wraps the module anew, as weights were frozen or unfrozen: {listed(names)}."
        )
        synchronize(self.root_device)  # it copies weights in a stream of its own
        wrapped._remove_autograd_hooks()
        self.model = module
        self.configure_ddp()
        synchronize(self.root_device)

    @override
    def setup_environment(self) -> None:
        """Start the processes' communication."""
        use_atomic_checkpoints(self)
        super().setup_environment()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save a file that says to which parameters its numbered states belong, for other strategies and orders."""
        assert self.lightning_module is not None
        if "optimizer_states" in checkpoint:
            names = parameter_names(self.lightning_module, self.optimizers)
            checkpoint = checkpoint | {PARAMETERS: group_names(self.optimizers, names)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file, or the folder of a sharded strategy, which is put together in host memory."""
        verify(checkpoint_path)
        assert self.lightning_module is not None
        saved = read_run(checkpoint_path, weights_only).named_as(self.lightning_module.state_dict())
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._loaded = saved
        return saved.extras | {"state_dict": saved.state_dict(), "optimizer_states": saved.optimizers}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each parameter the states that it had, by name, whatever the order of groups or parameters."""
        assert self._loaded is not None
        assert self.lightning_module is not None
        saved, self._loaded = self._loaded, None
        saved.optimizers = checkpoint["optimizer_states"]
        names = parameter_names(self.lightning_module, self.optimizers)
        optimizers = saved.named_optimizers(group_names(self.optimizers, names))
        states = [
            found.state_dict(optimizer.param_groups, names, numbered=True)
            for found, optimizer in zip(optimizers, self.optimizers, strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
