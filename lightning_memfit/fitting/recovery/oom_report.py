"""`OutOfMemoryReport`: what filled the memory when a run ran out of it, and what would have fitted."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.fitting.recovery.postmortem import explain
from lightning_memfit.fitting.size.device_memory import find_device_memory
from lightning_memfit.fitting.size.prediction import finds_its_size, is_divided, profile_fit, runtime_of
from lightning_memfit.fitting.size.search import largest_under
from lightning_memfit.measure.resident_tensors import held_bytes
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.profile.build import batch_size, resize_batch
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.reliability.whole_steps import check_folder, is_remote
from lightning_memfit.techniques.core.first_batch import first_batch

# --- torch's own record of CUDA allocations, for https://pytorch.org/memory_viz ---------------------------------------

# `torch.cuda.memory._record_memory_history` and `_dump_snapshot` are documented by torch, but their names are
# private, as is `torch._C._cuda_isHistoryEnabled`, which CUDA builds have; written for torch 2.11 to 2.13.
# `tests/rules/device/test_memory_history.py` fails when they move.


_MAX_ENTRIES = 100_000  # number of latest allocations and frees; they take some tens of MiB of host memory


def start_history() -> bool:
    """Start recording where every block of CUDA memory is allocated and freed.

    Returns:
        Whether it was started here. A history that is recorded already goes on as whoever started it wanted: to start
        another would change its length and its stacks, and to stop it would discard it.

    Raises:
        RuntimeError: If the allocator records none (cudaMallocAsync).
    """
    if torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
        return False
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python")
    return True


def stop_history() -> None:
    """Stop recording, and discard what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_snapshot(path: Path) -> None:
    """Write current allocations, and their history if it is recorded, as a pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    memory: Any = torch.cuda.memory  # the function has no annotations
    memory._dump_snapshot(str(path))


# --- the callback -----------------------------------------------------------------------------------------------------


_ADVICE = "`memfit plan` finds the fastest techniques that fit."


class OutOfMemoryReport(Callback):
    """Explain an out-of-memory error that ends a run, before the error is raised further.

    The report goes to stderr and to `text`: what module and optimizers hold by category, the largest tensors with the
    modules that made them, and the largest micro-batch that would have fitted. On CUDA, torch's memory snapshot is
    written as well.

    - The largest tensors are found by running the failing micro-batch once more, after the tensors that the error's
      frames hold are released. They are left out for several processes, manual optimization and errors outside of
      training.
    - The size that would have fitted comes from a trace of the step on tensors without memory, made before the run in
      seconds and cached. With `MicroBatching`, which searches for that size, it is left out, and one sample is run.

    Args:
        folder: Folder for snapshots named `out_of_memory_rank0.pickle`; older ones are kept. None takes the Trainer's
            `default_root_dir`, or the working folder where that is a URL.
        record_history: On CUDA, record where allocations come from, so that a snapshot shows the lines of code; this
            costs some microseconds per allocation. A history that is recorded already is left as it is. With
            allocators that record none (cudaMallocAsync) the run goes without, and says so.

    Attributes:
        text: The report; None before an error.
        snapshot_path: File of the snapshot; None without one.

    Raises:
        ValueError: If the folder is a URL.
    """

    def __init__(self, folder: str | Path | None = None, record_history: bool = True) -> None:
        if folder is not None and is_remote(folder):
            raise ValueError(f"`folder={folder}`: torch writes snapshots on this machine only. Name a folder here.")
        self.folder = folder
        self.record_history = record_history
        self.text: str | None = None
        self.snapshot_path: Path | None = None
        self._profile: ModelProfile | None = None
        self._without_profile = ""
        self._running: tuple[Any, int] | None = None
        self._records = False

    # --- hooks ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Trace the step, to know later what would have fitted."""
        self.text = self.snapshot_path = self._profile = None
        if stage != "fit":
            self._without_profile = "only training steps are traced"
        elif trainer.world_size > 1:
            self._without_profile = "several processes are not traced"
        elif is_divided(trainer):
            self._without_profile = f"{type(trainer.strategy).__name__} divides or moves parts of the model"
        elif not finds_its_size(trainer):
            try:
                self._profile = profile_fit(trainer, pl_module, first_batch(trainer), any_micro_batch=True)
            except (TraceError, ValueError) as error:
                self._without_profile = str(error)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a snapshot can be written, and start recording where CUDA memory is allocated."""
        if not DeviceKind.of(trainer.strategy.root_device).has_caching_allocator:
            return
        check_folder(trainer, "OutOfMemoryReport(folder=...)", self.folder)
        if self.record_history:
            try:
                self._records = start_history()
            except RuntimeError as error:
                rank_zero_warn(f"`OutOfMemoryReport` goes without a history of allocations: {_in_short(error)}")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch while it is processed."""
        self._running = batch, batch_idx

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release the batch."""
        self._running = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop recording."""
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the error and stop recording; Lightning calls no `teardown` after an exception."""
        running, self._running = self._running, None
        try:
            if is_out_of_memory(exception):
                self._explain(trainer, pl_module, exception, running)
        finally:
            self._stop()

    def _stop(self) -> None:
        if self._records:
            stop_history()
            self._records = False

    # --- the report -------------------------------------------------------------------------------------------------

    def _explain(
        self, trainer: Trainer, module: LightningModule, error: BaseException, running: tuple[Any, int] | None
    ) -> None:
        snapshot = self._take_snapshot(trainer)  # before anything is let go
        parts: tuple[Callable[[], str], ...] = (
            lambda: _what_is_held(trainer, module),
            lambda: explain(module, trainer.optimizers, self._step_again(trainer, module, error, running)),
            lambda: self._what_fits(trainer),
        )
        lines = []
        for part in parts:
            try:
                lines.append(part())
            except Exception as failure:  # which must not be raised in the place of the run's own error
                lines.append(f"A part of this report could not be made: {_in_short(failure)}")
        self.text = "\n".join([*lines, *snapshot])
        print(f"OutOfMemoryReport: {self.text}", file=sys.stderr, flush=True)

    def _take_snapshot(self, trainer: Trainer) -> list[str]:
        """Write a snapshot if the device has any, and return what to say of it."""
        if not DeviceKind.of(trainer.strategy.root_device).has_caching_allocator:
            return []
        path = None
        try:
            root = self.folder or trainer.default_root_dir
            path = _free_path(Path("." if is_remote(root) else root).absolute(), trainer.global_rank)
            dump_snapshot(path)
        except Exception as failure:
            if path is not None:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # what was written until the disk was full
            return [f"No memory snapshot could be written: {_in_short(failure)}"]
        self.snapshot_path = path
        return [f"Memory snapshot: {path}; open it at https://pytorch.org/memory_viz."]

    def _step_again(
        self, trainer: Trainer, module: LightningModule, error: BaseException, running: tuple[Any, int] | None
    ) -> Callable[[], Any]:
        """Return a function that runs the failing micro-batch once more, or does nothing if that could do harm."""
        if running is None or trainer.world_size > 1 or not module.automatic_optimization:
            return lambda: None
        batch, batch_idx = running
        if finds_its_size(trainer):
            batch = _one_sample(batch)
        for one in error_chain(error):
            traceback.clear_frames(one.__traceback__)

        def step() -> None:
            with isolate_rng(), _mute(module), trainer.precision_plugin.train_step_context():
                named = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
                output = module.training_step(batch, batch_idx) if named else module.training_step(batch)
                loss = output.get("loss") if isinstance(output, dict) else output
                if isinstance(loss, torch.Tensor):
                    torch.autograd.backward(loss)

        return step

    def _what_fits(self, trainer: Trainer) -> str:
        if finds_its_size(trainer):
            return f"`MicroBatching` found no micro-batch that fits. {_ADVICE}"
        memory = find_device_memory(trainer)
        if memory is None:
            return "What would have fitted is not known: the CPU has no limit. `MemoryLimit` gives it one."
        limit = memory.limit_bytes
        profile = self._profile
        if profile is None:
            return f"What would have fitted is not known: {self._without_profile}. {_ADVICE}"
        whole = profile.micro_batch_size
        if not profile.knows_every_size:
            return f"Other micro-batches than {whole} are not known: {profile.only_this_size}. {_ADVICE}"

        def needs(size: int) -> int:
            return estimate_step(profile, size, runtime_of(trainer)).reserved_bytes

        predicted = f"{format_bytes(needs(whole))} predicted for {_samples(whole)}, {format_bytes(limit)} there"
        size = largest_under(needs, limit, whole)
        if size == whole:
            return f"By prediction it should have fitted ({predicted}): something else takes memory. {_ADVICE}"
        if size == 0:
            return f"Not even one sample would have fitted ({predicted}; one takes {format_bytes(needs(1))}). {_ADVICE}"
        return (
            f"What would have fitted: {_samples(size)} at a time ({format_bytes(needs(size))}; {predicted}). "
            f"`MicroBatching(global_batch_size={whole * trainer.accumulate_grad_batches})` goes on with the same "
            f"effective batch. {_ADVICE}"
        )


def _what_is_held(trainer: Trainer, module: LightningModule) -> str:
    device = trainer.strategy.root_device
    held = held_bytes(module, trainer.optimizers, device)
    sizes = ", ".join(f"{str(category).replace('_', ' ')} {format_bytes(n)}" for _, category, n in held)
    return (
        f"Out of memory on {device}, rank {trainer.global_rank}, after {trainer.global_step} optimizer steps. "
        f"Module and optimizers hold {format_bytes(held.total())} there: {sizes or 'nothing'}."
    )


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}."


def _one_sample(batch: Any) -> Any:
    """Return the first sample, or the whole batch if it can't be split."""
    try:
        return resize_batch(batch, batch_size(batch), 1)
    except ValueError:
        return batch


def _samples(size: int) -> str:
    return "1 sample" if size == 1 else f"{size} samples"


def _free_path(folder: Path, rank: int) -> Path:
    number, path = 1, folder / f"out_of_memory_rank{rank}.pickle"
    while path.exists():
        number += 1
        path = folder / f"out_of_memory_rank{rank}-{number}.pickle"
    return path


@contextmanager
def _mute(module: LightningModule) -> Iterator[None]:
    """Suppress logging in a step that is run only for its tensors."""
    names = [name for name in ("log", "log_dict") if name not in vars(module)]
    vars(module).update(dict.fromkeys(names, lambda *_, **__: None))
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
