"""How many lines of the package one import loads: what a user of one feature has to read at most.

`python -m tests.loads` prints them as JSON. A callback counts with what a fit of ten steps on the CPU has loaded by its
end, as much is imported on first use. All start as forks of one process that has torch, Lightning and transformers,
which take eight seconds to import, and nothing of the package.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
OWN = (ROOT / "lightning_memfit", ROOT / "cli")

WAYS = {
    "lightning_memfit": "import",
    "TF32": "refused fit",  # the CPU has no TF32: the callback refuses the run in its `setup`
    "Optimizer8bit": "fit",
    "ActivationCheckpointing": "fit",
    "GradientRelease": "fit",
    "MicroBatching": "fit",
    "MemFit": "fit",
    "ZeroInfinityStrategy": "import",  # a fit needs DeepSpeed's compiled kernels and a drive
}
"""What is imported, and what else is done with it before lines are counted."""

ARGUMENTS = {"MicroBatching": {"micro_batch_size": 2}}
"""Of batches of four samples: it splits them, which it has no reason to where no memory limit is known."""


def measure() -> dict[str, int]:
    """Lines of this package that are loaded, by what was imported.

    To be called where nothing of the package is imported yet.

    Raises:
        RuntimeError: If a fit fails.
    """
    for library in ("torch", "lightning.pytorch", "transformers", "bitsandbytes"):
        import_module(library)
    assert not _own_files(), "something of the package is imported already"
    return {name: _in_a_fork(name) for name in WAYS}


def _in_a_fork(name: str) -> int:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_use, args=(name, sender))
    process.start()
    sender.close()
    try:
        lines: int = receiver.recv()
    except EOFError:
        raise RuntimeError(f"a fit with `{name}` failed: see its traceback above") from None
    finally:
        process.join()
    return lines


def _use(name: str, sender: Connection) -> None:
    sys.stdout = sys.stderr
    package = import_module("lightning_memfit")
    if name != package.__name__:
        used = getattr(package, name)
        if WAYS[name] == "fit":
            _fit(used(**ARGUMENTS.get(name, {})))
        elif WAYS[name] == "refused fit":
            _fit_that_is_refused(used())
    sender.send(sum(len(path.read_text().splitlines()) for path in _own_files()))


def _fit(callback: object) -> None:
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.tanh(self.linear(hidden))

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.blocks(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    samples = TensorDataset(torch.randn(40, 64), torch.randn(40, 64))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(samples, batch_size=4))
    if trainer.global_step != 10:
        raise RuntimeError(f"the fit made {trainer.global_step} steps instead of 10")


def _fit_that_is_refused(callback: object) -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        _fit(callback)
    except MisconfigurationException:
        return
    raise RuntimeError(f"{type(callback).__name__} was not refused: count a fit")


def _own_files() -> set[Path]:
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    files = {Path(getattr(module, "__file__", None) or "") for module in modules}
    return {path for path in files if any(folder in path.parents for folder in OWN)}


if __name__ == "__main__":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # a profile that was cached before would leave the tracer out
        os.environ["MEMFIT_CACHE"] = folder
        print(json.dumps(measure()))
