"""`ZeroStrategy`: DeepSpeed's ZeRO stages, from few typed arguments, on CUDA devices and on the CPU."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.estimate.deepspeed_sizes import zero_sizes
from lightning_memfit.extras import require
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.process import return_freed_memory
from lightning_memfit.nvme.extensions import outlive_killed_builds
from lightning_memfit.profile.replaced import keep_constructors
from lightning_memfit.reliability.rank_watch import watch_ranks
from lightning_memfit.strategies.checkpoint_io import consolidated, use_atomic_checkpoints
from lightning_memfit.strategies.integrity import ZERO_MARK, CheckpointError, is_sharded, replacing_folder, verify
from lightning_memfit.strategies.launched import (
    AVERAGES,
    FLAT,
    EqualBatches,
    check_optimizer,
    may_accumulate,
    refuse_callbacks,
    synchronize_batch_norms,
)
from lightning_memfit.strategies.safe_loading import without_code
from lightning_memfit.strategies.saved_names import check_names, plain_name, without_other_states
from lightning_memfit.strategies.sequence_parallel import DividesSequences
from lightning_memfit.strategies.upstream.deepspeed import (
    begin_pass,
    check_shapes,
    disable_shared_memory_collectives,
    gather_before_hooks,
    load_run,
    remove_engine_hooks,
    removing_engine_hooks_only,
    renew_masters,
    save_what_is_not_stepped,
    step_by_gradients_of_the_window,
    take_buffers,
    whole_weights_in_builds,
)
from lightning_memfit.strategies.upstream.huggingface import partitioned_builds
from lightning_memfit.strategies.zero_config import Config, ZeroOptions, check_names_of_options, with_raw_options
from lightning_memfit.strategies.zero_steps import StepsUnderZero

_IN_HOOKS = (
    "`{}.{}` runs under ZeRO, where gradients are None and what is written into weights is lost: DeepSpeed keeps both "
    "in buffers of its own. `self.clip_gradients` works, `deepspeed.utils.safe_get_full_grad` reads a gradient. See "
    "docs/guides/weights.md."
)


def prefer_fused(optimizer: Optimizer) -> bool:
    """Make a plain Adam or AdamW of torch step with its fused kernel, which is several times faster on the CPU.

    Returns:
        Whether it was changed.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = [group for group in optimizer.param_groups if group["fused"] is None and not group["foreach"]]
    for group in groups:
        group["fused"] = True
    return bool(groups)


class ZeroStrategy(DividesSequences, EqualBatches, DeepSpeedStrategy):
    """Shard optimizer states, gradients and parameters over ranks with DeepSpeed ZeRO, and offload them to the host.

    It runs on CUDA devices and, to try a recipe out, on the CPU over gloo. Precision is DeepSpeed's: `bf16-mixed` and
    `16-mixed` keep half-precision weights, without autocast, and fp32 master weights in the optimizer.

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        offload_optimizer: Keep optimizer states on the host and step there.
        offload_parameters: With stage 3, keep parameters on the host between uses.
        pin_memory: Pin what is kept on the host: copies are faster, but nothing else can use that memory.
        bucket_size: Elements reduced or gathered at once. By default the model's largest parameter, at most 2e8.
        sub_group_size: With stage 3, elements updated at once. By default a sixteenth of a rank's share.
        config: Raw DeepSpeed options, or the path of a JSON file of them, applied on top of the configuration that the
            arguments make. Options that an argument sets can't be set here.
        load_full_weights: With stage 3, start a new optimizer from the weights of `ckpt_path`.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        sequence_parallel_size: Number of neighbouring ranks that share every sequence, each with a part of its tokens.
        accelerator: Set by Lightning.
        parallel_devices: Set by Lightning.
        cluster_environment: Set by Lightning.
        precision_plugin: Set by Lightning.
        process_group_backend: Backend of `torch.distributed`; by default nccl on CUDA, gloo on the CPU.
        timeout: How long a collective waits.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: If the arguments contradict each other or `config`, or DeepSpeed has no option of that name.
    """

    strategy_name = "memfit_zero"
    chooses_sizes = True
    """Sizes of buckets and the like that the user doesn't set follow from the model, instead of being DeepSpeed's."""
    config: Config

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        pin_memory: bool = False,
        bucket_size: int | None = None,
        sub_group_size: int | None = None,
        config: str | Path | dict[str, Any] | None = None,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
        sequence_parallel_size: int = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        require("deepspeed", type(self).__name__)
        if load_full_weights and stage != 3:
            raise ValueError(f"`load_full_weights=True` needs `stage=3`, not `stage={stage}`.")
        options = ZeroOptions(stage, offload_optimizer, offload_parameters, pin_memory, bucket_size, sub_group_size)
        self._raw: Config = self._load_config(config) or {}
        check_names_of_options(self._raw)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            config=options.config(self._raw),
            load_full_weights=load_full_weights,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        self.sequence_parallel_size = sequence_parallel_size
        self._train_engine: Any = None
        self._steps: StepsUnderZero | None = None
        self._frozen: dict[str, nn.Parameter] = {}
        self._accumulates = False

    # --- processes and devices --------------------------------------------------------------------------------------

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    @override
    def setup_environment(self) -> None:
        """Start the processes' communication; Lightning's own strategy refuses the CPU here."""
        use_atomic_checkpoints(self)
        step_by_gradients_of_the_window()
        outlive_killed_builds()
        if self._on_cpu or {"offload_optimizer", "offload_param"} & set(self.config["zero_optimization"]):
            return_freed_memory()
        if not self._on_cpu:
            super().setup_environment()
            return
        self._check_cpu()
        disable_shared_memory_collectives()
        DDPStrategy.setup_environment(self)
        watch_ranks(self)

    @override
    def setup_distributed(self) -> None:
        """Do the same as Lightning's, without its check of device indices, which a CPU does not have."""
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    @override
    def root_device(self) -> torch.device:
        """The rank's device; the CPU has an index, which DeepSpeed compares with zero."""
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    def _check_cpu(self) -> None:
        from deepspeed.accelerator import get_accelerator

        name = get_accelerator().device_name()
        if name != "cpu":
            raise MisconfigurationException(
                f"`accelerator=cpu`, but DeepSpeed uses {name!r} on this machine. Set the environment variable "
                "DS_ACCELERATOR=cpu."
            )
        if self.precision_plugin.precision.startswith("16"):
            raise MisconfigurationException(
                f"`precision={self.precision_plugin.precision}`: DeepSpeed has no float16 on the CPU. Use bf16-mixed."
            )

    # --- configuration ----------------------------------------------------------------------------------------------

    @override
    def _init_config_if_needed(self) -> None:
        """Add the Trainer's settings; Lightning lets raw options silently override them."""
        if self._config_initialized or self.lightning_module is None:
            super()._init_config_if_needed()
            return
        trainer = self.lightning_module.trainer
        precision = self.precision_plugin.precision
        typed: dict[str, tuple[str, Any]] = {
            "bf16.enabled": ("trainer.precision", precision.startswith("bf16")),
            "fp16.enabled": ("trainer.precision", precision.startswith("16")),
        }
        if trainer.gradient_clip_val is not None:
            typed["gradient_clipping"] = ("trainer.gradient_clip_val", trainer.gradient_clip_val)
        for section in ("bf16", "fp16"):
            self.config.pop(section, None)
        super()._init_config_if_needed()
        self.config = with_raw_options(self.config, self._raw, typed)

    def _choose_accumulation(self) -> None:
        """By hand, let `step` end what was accumulated, however many passes it took."""
        assert self.lightning_module is not None
        automatic, zero = self.lightning_module.automatic_optimization, self.config["zero_optimization"]
        made = {"managed_gradient_accumulation": automatic}
        typed: dict[str, tuple[str, Any]] = {"managed_gradient_accumulation": ("automatic_optimization", automatic)}
        # ZeRO-1 would step by the gradients of the last pass alone, where a weight takes part in earlier ones only.
        sums_in_step = zero["stage"] == 1 and (not automatic or may_accumulate(self.lightning_module.trainer))
        if sums_in_step:
            chosen_by = "trainer.accumulate_grad_batches" if automatic else "automatic_optimization"
            typed["zero_optimization.overlap_comm"] = (chosen_by, False)
        config = self.config | made | {"zero_optimization": zero | {"overlap_comm": not sums_in_step}}
        self.config = with_raw_options(config, self._raw, typed)

    def _fill_sizes(self, model: nn.Module) -> None:
        numels = [p.numel for p in parameter_table(model) if not p.shared_with]
        self.config["zero_optimization"] = zero_sizes(self.config["zero_optimization"], numels, self.world_size)

    # --- model and optimizer ----------------------------------------------------------------------------------------

    @override
    def init_deepspeed(self) -> None:
        """Make the engine, without Lightning's warning that `clip_gradients` does nothing: `StepsUnderZero` clips."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Since DeepSpeed handles gradient clipping internally")
            super().init_deepspeed()

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """With stage 3, partition parameters as they are made."""
        keep_constructors()  # DeepSpeed replaces some of torch's
        with super().model_sharded_context():
            if not self.zero_stage_3:
                yield
                return
            with partitioned_builds(self.config), whole_weights_in_builds():
                yield

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        assert self.lightning_module is not None
        refuse_callbacks(self.lightning_module.trainer, self.strategy_name, AVERAGES)
        synchronize_batch_norms(self.lightning_module.trainer, self.lightning_module)
        if optimizer is not None:
            check_optimizer(optimizer, self.strategy_name, FLAT)
            self._refuse_frozen_groups(optimizer)
        self._choose_accumulation()
        self._fill_sizes(model)
        if optimizer is not None:  # before DeepSpeed puts its own tensors into the groups
            given = {id(one) for group in optimizer.param_groups for one in group["params"]}
            frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
            self._frozen = {name: one for name, one in frozen.items() if id(one) in given}
        offloaded = "offload_optimizer" in self.config["zero_optimization"]
        if optimizer is not None and offloaded:
            # DeepSpeed insists on its own Adam, compiled at first use; torch's fused one is as fast, and any other
            # optimizer works as well.
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        if optimizer is not None and (offloaded or self._on_cpu) and prefer_fused(optimizer):
            rank_zero_info(f"{type(self).__name__}: {type(optimizer).__name__} steps on the CPU with fused=True.")
        zero, precision = self.config["zero_optimization"], self.precision_plugin.precision
        if self._on_cpu or offloaded or "offload_param" in zero:
            from lightning_memfit.strategies.host_check import require_host_memory  # it loads the model of estimates

            accumulates = self.lightning_module.trainer.accumulate_grad_batches > 1
            require_host_memory(
                model, optimizer, zero, precision, self.world_size, self.num_processes, self._on_cpu, accumulates
            )
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def _refuse_frozen_groups(self, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            if not self.zero_stage_3 and not any(one.requires_grad for one in group["params"]):
                raise MisconfigurationException(
                    f"All weights of the optimizer's group {number} are frozen, and ZeRO-1 and -2 can't divide a "
                    "group that trains nothing. Leave it out of `configure_optimizers`, or train with `strategy="
                    "memfit_fsdp2`."
                )

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        if self._train_engine is not None:
            self._train_engine.destroy()  # an earlier `fit` made it: its hooks would run as well as the new engine's
        remove_engine_hooks(model)  # of one that evaluated
        super()._initialize_deepspeed_train(model)
        self._train_engine = self.model
        gather_before_hooks(model)
        assert self.lightning_module is not None
        save_what_is_not_stepped(self.model)
        trainer = self.lightning_module.trainer
        self._detach()
        clips_itself = is_overridden("configure_gradient_clipping", self.lightning_module, LightningModule)
        always_clips = trainer.gradient_clip_val is None or not clips_itself
        self._steps = StepsUnderZero(self.model, self.precision_plugin, self._frozen, always_clips)
        for name in ("on_before_optimizer_step", "configure_gradient_clipping"):
            if is_overridden(name, self.lightning_module, LightningModule):
                rank_zero_warn(_IN_HOOKS.format(type(self.lightning_module).__name__, name))

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """After `fit`, evaluate with the engine that trained; a second engine would partition the partitions again."""
        if self._train_engine is not None and self._train_engine.module is model:
            model.to(self.root_device)
            self.model = self._train_engine
            return
        self._fill_sizes(model)
        with removing_engine_hooks_only():
            super()._initialize_deepspeed_inference(model)
        gather_before_hooks(model)

    @override
    def teardown(self) -> None:
        """Give the hooks back, and end as Lightning does."""
        self._detach()
        super().teardown()

    def _detach(self) -> None:
        if self._steps is not None:
            self._steps.detach()
        self._steps = None

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Lightning says when a window ends, as for every other strategy: the last of an epoch may be shorter."""
        return False

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward accumulate, so that the engine doesn't step: DeepSpeed reduces as its stage demands."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Leave the division by `accumulate_grad_batches`, and which batches are accumulated, to who calls.

        Lightning's own strategy makes DeepSpeed divide once more: gradients become too small by that factor, which Adam
        hides and clipping does not. And DeepSpeed counts on over epochs, so that a window which an epoch's end cuts off
        is mixed with the next epoch's, or lost (deepspeed 0.19).
        """
        assert self.lightning_module is not None
        assert self._steps is not None
        self._steps.begin_pass()
        begin_pass(self.deepspeed_engine)
        if self.lightning_module.automatic_optimization:
            self.deepspeed_engine.set_gradient_accumulation_boundary(not self._accumulates)
        return super().backward(closure_loss, optimizer, *args, **{"scale_wrt_gas": False, **kwargs})

    @override
    def waiting_ranks(self, evaluates: bool) -> int | None:
        """Ranks that have whole weights evaluate by themselves."""
        return 1 if evaluates and not self.zero_stage_3 else None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    _is_on_disk = False
    """Whether states or parameters lie on disk."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder of DeepSpeed's; an existing one is replaced when the new one is complete."""
        with replacing_folder(self.broadcast(filepath), ZERO_MARK) as folder:
            super().save_checkpoint(checkpoint, folder, storage_options)
            self._complete(folder)

    def _complete(self, folder: Path) -> None:
        """Add to a folder what DeepSpeed leaves out."""

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of a stage of the same kind, written on any number of ranks; or the weights of any checkpoint.

        Weights alone are loaded to evaluate, and with `load_full_weights` to train.

        Raises:
            ValueError: If the checkpoint is another strategy's, or of another module or optimizer.
        """
        module = self.lightning_module
        assert module is not None
        path: str = self.broadcast(str(checkpoint_path))
        is_training = module.trainer.state.fn == TrainerFn.FITTING
        if is_training and not self.load_full_weights:
            if not (folder := Path(path)).joinpath(ZERO_MARK).is_file():
                if "://" not in path and not folder.exists():
                    verify(path)
                raise CheckpointError(without_other_states(path, f"`strategy={self.strategy_name}`"))
            verify(path)
            with without_code(path, weights_only):
                extras, saved = load_run(self.deepspeed_engine, folder, module.strict_loading, self._is_on_disk)
            if saved != self.world_size:
                rank_zero_info(
                    f"{type(self).__name__}: {path!r} was saved on {saved} ranks; DeepSpeed's `ds_to_universal` has "
                    f"converted it for {self.world_size}."
                )
            return extras
        if is_sharded(path):
            verify(path)
            whole = consolidated(path, weights_only)
        else:
            whole = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        weights = {plain_name(name): value for name, value in whole.pop("state_dict").items()}
        called = {plain_name(name): name for name in module.state_dict()}
        check_names(path, weights, called, module.strict_loading)
        check_shapes(
            path, {called.get(name, name): one.shape for name, one in weights.items() if hasattr(one, "shape")}, module
        )
        weights = {called.get(name, name): value for name, value in weights.items()}
        if self.zero_stage_3:
            self._restore_zero_state(
                {"state_dict": weights}, strict=module.strict_loading
            )  # on the first rank, for all
            take_buffers(module, weights)
            if is_training:
                renew_masters(self.deepspeed_engine, weights)
        else:
            module.load_state_dict(weights, strict=False)  # names are checked
        return whole

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the weights."""
