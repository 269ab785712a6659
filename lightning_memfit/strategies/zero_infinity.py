"""`ZeroInfinityStrategy`: ZeRO-3 with optimizer states, parameters or both on disk, checked before and during a run."""

import copy
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.estimate.deepspeed_sizes import (
    AioSettings,
    InfinitySizes,
    infinity_sizes,
    most_per_module,
    zero_sizes,
)
from lightning_memfit.memory import format_bytes, parse_bytes
from lightning_memfit.memory.breakdown import Tier
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.nvme.folder import RunFolder, folder_bytes, new_run_id
from lightning_memfit.nvme.watermark import check_reserve
from lightning_memfit.strategies.upstream.deepspeed import (
    copy_parameters_from_swap_buffers,
    gather_states_from_disk,
    swap_in_own_dtype,
)
from lightning_memfit.strategies.zero import ZeroStrategy
from lightning_memfit.strategies.zero_config import with_raw_options

if TYPE_CHECKING:
    from lightning_memfit.estimate.deepspeed import DeepSpeedRun, OffloadTarget

Parameters = tuple[ParameterInfo, ...]

_PATH_VARIABLE = "MEMFIT_NVME_PATH"
_STEPS_WELL = ("torch.optim.", "deepspeed.ops.")


class ZeroInfinityStrategy(ZeroStrategy):
    """Train models that fit in neither device nor host memory: states are kept on disk and stepped piece by piece.

    Before weights are loaded, a preflight checks the drive and all memory, and refuses what would fail, with the fix.
    Every run has its own folder below `nvme_path`, which is removed when the process ends. Free space is watched during
    training, because a full disk would corrupt the weights silently. Sizes of all buffers follow from the model.

    Args:
        nvme_path: Folder on a local NVMe drive. It must exist. By default the folder in MEMFIT_NVME_PATH, so that a
            recipe can move from machine to machine.
        offload_optimizer: Put optimizer states and gradients on disk.
        offload_parameters: Put parameters on disk.
        params_in_host: Elements of parameters that stay in host memory, for fewer reads.
        disk_reserve: Space that must stay free on the drive.
        **options: Further arguments of `ZeroStrategy`.

    Attributes:
        folder: The run's folder; None before.

    Raises:
        ValueError: If nothing is to be offloaded, no folder is named, or an argument is out of range.
    """

    strategy_name = "memfit_zero_infinity"
    _is_on_disk = True

    def __init__(
        self,
        nvme_path: str | None = None,
        offload_optimizer: bool = True,
        offload_parameters: bool = True,
        params_in_host: int = 0,
        disk_reserve: int | str = "1GiB",
        **options: Any,
    ) -> None:
        if not (offload_optimizer or offload_parameters):
            raise ValueError("`offload_optimizer` and `offload_parameters` are both false: use `memfit_zero_3`.")
        nvme_path = nvme_path or os.environ.get(_PATH_VARIABLE)
        if not nvme_path:
            raise ValueError(f"`nvme_path` is not set: name a folder on a local NVMe drive, or set {_PATH_VARIABLE}.")
        if params_in_host < 0:
            raise ValueError(f"`params_in_host={params_in_host}` must be 0 or more elements.")
        if options.pop("stage", 3) != 3:
            raise ValueError("`stage` must be 3: below it DeepSpeed keeps in memory what should go to disk.")
        super().__init__(3, offload_optimizer, offload_parameters, **options)
        self.nvme_path = nvme_path
        self.params_in_host = params_in_host
        self.reserve_bytes = parse_bytes(disk_reserve, "disk_reserve")
        self.folder: RunFolder | None = None
        self._offloads = (offload_optimizer, offload_parameters)
        given, fields = self._raw.get("aio", {}), ("block_size", "queue_depth", "intra_op_parallelism")
        self._aio = AioSettings(**{name: given[name] for name in fields if name in given})
        self.remote_device = "nvme" if offload_parameters else None

    @override
    def setup_environment(self) -> None:
        """Start the processes' communication."""
        super().setup_environment()
        if self._on_cpu:
            copy_parameters_from_swap_buffers()
            swap_in_own_dtype()

    # --- before anything is loaded ----------------------------------------------------------------------------------

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Check and prepare the drive, then put parameters there as they are made."""
        with ExitStack() as stack:
            if self._train_engine is None:  # a second `zero.Init` would remove the parameters' files
                assert self.lightning_module is not None
                self._prepare(parameters_once_built(self.lightning_module))
                stack.enter_context(super().model_sharded_context())
            yield

    @override
    def _fill_sizes(self, model: nn.Module) -> None:
        self._prepare(parameter_table(model))
        super()._fill_sizes(model)

    def _prepare(self, parameters: Parameters) -> None:
        if self.folder is not None:
            return
        self._init_config_if_needed()
        run_id = self.broadcast(new_run_id())
        if self.local_rank == 0:
            self._preflight(parameters)
            self.folder = RunFolder.create(self.nvme_path, run_id)
        self.barrier()  # where the first one fails, `rank_watch` ends the others
        self.folder = self.folder or RunFolder.join(self.nvme_path, run_id)
        weakref.finalize(self, self.folder.close)
        self._configure(self._sizes(parameters))

    def _preflight(self, parameters: Parameters) -> None:
        from lightning_memfit.device.probe import probe_device  # by those who train from disk alone, once they do
        from lightning_memfit.estimate.deepspeed import deepspeed_memory
        from lightning_memfit.nvme.preflight import preflight, require

        assert self.lightning_module is not None
        accumulates = self.lightning_module.trainer.accumulate_grad_batches > 1
        memory = deepspeed_memory(self._described(parameters, self._sizes(parameters), accumulates))
        device = self.root_device
        free = probe_device(device.index).available_bytes if DeviceKind.of(device).has_own_memory else None
        require(self.nvme_path, preflight(self.nvme_path, memory, self.num_processes, free, self.reserve_bytes))
        on_tiers = ", ".join(f"{format_bytes(memory.around_passes.total(tier))} {tier}" for tier in Tier)
        peak = format_bytes(memory.host_peak_bytes)
        rank_zero_info(f"{type(self).__name__}: each rank needs {on_tiers}, {peak} of host memory at most.")

    def _described(self, parameters: Parameters, sizes: InfinitySizes, accumulates: bool) -> "DeepSpeedRun":
        from lightning_memfit.estimate.deepspeed import DeepSpeedRun

        numels = [p.numel for p in parameters if not p.shared_with]
        zero = zero_sizes(self.config["zero_optimization"], numels, self.world_size)
        places: list[OffloadTarget] = ["nvme" if on_disk else "none" for on_disk in self._offloads]
        return DeepSpeedRun(
            parameters,
            world_size=self.world_size,
            itemsize=sizes.itemsize,
            offload_optimizer=places[0],
            offload_parameters=places[1],
            bucket_size=zero["reduce_bucket_size"],
            sizes=sizes,
            accumulates=accumulates,
            on_cpu=self._on_cpu,
            is_fp16=self.precision_plugin.precision.startswith("16"),
        )

    def _sizes(self, parameters: Parameters, groups: list[list[int]] | None = None) -> InfinitySizes:
        trained = [p.numel for p in parameters if p.trainable and not p.shared_with]
        itemsize = 2 if "16" in self.precision_plugin.precision else 4
        large = self._aio.min_swapped_bytes // itemsize * self.world_size
        return infinity_sizes(
            groups or [trained],
            self.world_size,
            itemsize,
            self._aio,
            params_per_module=most_per_module(parameters, large),
            max_in_cpu=self.params_in_host,
        )

    def _configure(self, sizes: InfinitySizes) -> None:
        """Put sizes into the configuration; the user's own settings stay."""
        assert self.folder is not None
        made = sizes.config(str(self.folder.path), *self._offloads)
        zero, sections = self.config["zero_optimization"], made["zero_optimization"]
        for name in ("offload_optimizer", "offload_param"):
            if name in sections:
                zero[name] = {"pin_memory": zero[name]["pin_memory"], **sections.pop(name)}
        config = self.config | {"zero_optimization": zero | sections, "aio": made["aio"]}
        self.config = with_raw_options(config, self._raw, {})

    # --- training ---------------------------------------------------------------------------------------------------

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        self._fill_sizes(model)
        if optimizer is not None:
            self._check_optimizer(optimizer)
            groups = [
                [int(getattr(p, "ds_numel", p.numel())) for p in group["params"] if p.requires_grad]
                for group in optimizer.param_groups
            ]
            self._configure(self._sizes(parameter_table(model), [group for group in groups if group]))
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse optimizers whose states differ from what the swapper assumes: training would use garbage."""
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        if self._offloads[0] and not name.startswith(_STEPS_WELL):
            raise MisconfigurationException(
                f"{name} can't keep its states on disk: DeepSpeed swaps fp32 tensors only, and 8-bit states would be "
                "lost silently. Use an optimizer of torch.optim, or `offload_optimizer: false`."
            )

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Drop the optimizer's offloading: without an optimizer, DeepSpeed must not look for its files."""
        zero = self.config["zero_optimization"]
        section = zero.pop("offload_optimizer", None)
        try:
            super()._initialize_deepspeed_inference(model)
        finally:
            if section is not None:
                self.config["zero_optimization"]["offload_optimizer"] = section

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, then stop if the drive is about to be full."""
        result = super().optimizer_step(*args, **kwargs)
        if self.folder is not None:
            check_reserve(self.folder.path, self.reserve_bytes)
        return result

    @property
    def swapped_bytes(self) -> int:
        """Bytes that the run currently keeps on this machine's drive, for monitors."""
        return 0 if self.folder is None else folder_bytes(self.folder.path)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave nothing on the drive."""
        super().on_exception(exception)
        if self.folder is not None:
            self.folder.close()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, unless the states on disk are in doubt."""
        if self.folder is not None:
            check_reserve(self.folder.path, self.reserve_bytes)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def _complete(self, folder: Path) -> None:
        if self._offloads[0]:
            gather_states_from_disk(self.deepspeed_engine, folder)


def parameters_once_built(module: LightningModule) -> Parameters:
    """Build a copy on the meta device, without memory, and read its parameters. Module and random state stay unchanged.

    What callbacks add to `configure_model` is left out, because adapters are small.

    Raises:
        MisconfigurationException: If the module can't be built this way.
    """
    from lightning_memfit.profile.fake import fake_pretrained_weights

    random_state, trainer = torch.get_rng_state(), getattr(module, "_trainer", None)
    try:
        clone = copy.deepcopy(module, {} if trainer is None else {id(trainer): None})
        with torch.device("meta"), fake_pretrained_weights():
            type(clone).configure_model(clone)
    except Exception as error:
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_model can't be run without memory, to learn the parameters' shapes "
            f"({type(error).__name__}: {error}). Build the model in `__init__` instead."
        ) from error
    finally:
        torch.set_rng_state(random_state)
    return parameter_table(clone)
