"""`OutOfMemoryReport`: what filled the memory when a run ran out of it."""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_memfit.measure.resident_tensors import held_bytes
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.profile.build import batch_size, resize_batch
from lightning_memfit.reliability.whole_steps import check_folder, is_remote

# --- what fills the memory --------------------------------------------------------------------------------------------

_NUM_NAMED = 5
_NUMBER = re.compile(r"\b\d+\b")


@contextmanager
def _kept_for_backward(module: nn.Module) -> Iterator[dict[int, tuple[int, str]]]:
    """Record bytes and description of the tensors that forward passes keep for backward, by storage."""
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[int, str]] = {}
    owners: list[str] = []
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, name=name: owners.append(name)))
        handles.append(child.register_forward_hook(lambda *_: owners.pop() and None, always_call=True))

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            owner = owners[-1] if owners else ""
            text = f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]} kept for backward by `{owner or 'training_step'}`"
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), text))
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        for handle in handles:
            handle.remove()


def explain(trainer: Trainer, run: Callable[[], Any], hint: str = "") -> str:
    """Run the failing micro-batch once more and name the largest tensors alive when it fails.

    Args:
        trainer: The trainer.
        run: Runs the micro-batch; its error is expected.
        hint: What would help.
    """
    module = trainer.lightning_module
    held = held_bytes(module, trainer.optimizers, trainer.strategy.root_device)  # not what the run leaves
    kept_until = "by the whole micro-batch"
    with _kept_for_backward(module) as tensors:
        try:
            run()
        except Exception:
            kept_until = "until the error"
    found = list(tensors.values())
    for name, parameter in module.named_parameters():
        found.append((parameter.nbytes, f"{tuple(parameter.shape)} parameter `{name}`"))
        if parameter.grad is not None:
            found.append((parameter.grad.nbytes, f"{tuple(parameter.shape)} gradient of `{name}`"))
    sizes = ", ".join(f"{str(category).replace('_', ' ')} {format_bytes(n)}" for _, category, n in held)
    summary = f"Module and optimizers hold {format_bytes(held.total())} on the device: {sizes or 'nothing'}"
    if kept := sum(size for size, _ in tensors.values()):
        summary += f"; kept for backward {kept_until} {format_bytes(kept)}"
    lines = [hint] if hint else []  # first, for who shows no more than the beginning
    lines.append(f"{summary}. The largest tensors:")
    lines += [f"  {format_bytes(size)}  {text}" for size, text in _largest(found)]
    return "\n".join(lines)


def _largest(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return bytes and description of the largest; equal ones of numbered modules, such as blocks, are grouped."""
    alike: dict[str, list[tuple[int, str]]] = {}
    for size, text in found:
        what, mark, owner = text.partition("`")
        alike.setdefault(what + mark + _NUMBER.sub("*", owner), []).append((size, text))
    together = [
        (sum(size for size, _ in members), f"{len(members)} x {text}" if len(members) > 1 else members[0][1])
        for text, members in alike.items()
    ]
    return sorted(together, reverse=True)[:_NUM_NAMED]


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


class OutOfMemoryReport(Callback):
    """Explain an out-of-memory error that ends a run, before the error is raised further.

    The report goes to stderr and to `text`: what parameters, optimizer states and activations hold, and the largest
    tensors with the modules that made them. On CUDA, torch's memory snapshot is written as well. What would fit,
    `memfit plan` says.

    The largest tensors are found by running the failing micro-batch (with `MicroBatching` one sample) once more, after
    the tensors that the error's frames hold are released. They are left out for several processes, manual optimization
    and errors outside of training.

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
        self._running: tuple[Any, int] | None = None
        self._records = False

    # --- hooks ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the run before."""
        self.text = self.snapshot_path = None

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
        text = f"Out of memory on {trainer.strategy.root_device}, rank {trainer.global_rank}, after "
        text += f"{trainer.global_step} optimizer steps. "
        try:
            text += explain(trainer, _step_again(trainer, module, error, running))
        except Exception as failure:  # which must not be raised in the place of the run's own error
            text += f"What fills it could not be found out: {_in_short(failure)}"
        self.text = "\n".join((text, "`memfit plan` finds the fastest techniques that fit.", *snapshot))
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
    trainer: Trainer, module: LightningModule, error: BaseException, running: tuple[Any, int] | None
) -> Callable[[], Any]:
    """Return a function that runs the failing micro-batch once more, or does nothing if that could do harm."""
    if running is None or trainer.world_size > 1 or not module.automatic_optimization:
        return lambda: None
    batch, batch_idx = running
    if any(getattr(callback, "predicts_memory", False) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        with suppress(ValueError):  # a batch that can't be split
            batch = resize_batch(batch, batch_size(batch), 1)
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)

    def step() -> None:
        muted: Any = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
        with isolate_rng(), patch.multiple(module, **muted), trainer.precision_plugin.train_step_context():
            named = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            output = module.training_step(batch, batch_idx) if named else module.training_step(batch)
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor):
                torch.autograd.backward(loss)

    return step


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}."


def _free_path(folder: Path, rank: int) -> Path:
    names = (f"out_of_memory_rank{rank}{'' if number == 1 else f'-{number}'}.pickle" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())
