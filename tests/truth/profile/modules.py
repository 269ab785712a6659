"""Small modules and batches for the tests of tracing."""

import copy
import gc
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile import trace
from lightning_memfit.profile.events import EventList, canonical
from lightning_memfit.profile.fake import turn_fake
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.step import StepOptions, Workload, run_step
from lightning_memfit.profile.trace import Emulation, Trace, TraceRequest
from tests.helpers.trainers import fit

WIDTH, CLASSES, SAMPLES = 64, 10, 32


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES - 1, (SAMPLES,), generator=generator)
    labels[3] = CLASSES - 1
    return {"x": torch.randn(SAMPLES, WIDTH, generator=generator), "y": labels}


class Classifier(pl.LightningModule):
    """Two layers, a head, cross-entropy and AdamW: what the modules of these tests vary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.head(self.net(batch["x"])), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Repeated:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Any:
        return iter([self.batch] * self.count)

    def __len__(self) -> int:
        return self.count


def true_peak(make_module: Any, make_batch: Any, batches: int, *, max_epochs: int = 1, **options: Any) -> int:
    """Peak of a plain Lightning run by the allocator's events."""
    gc.collect()  # what earlier tests left must not be freed in between
    with allocation_events() as changes:
        fit(make_module(), loader=Repeated(make_batch(), batches), max_epochs=max_epochs, **options)
    return int(np.cumsum(changes).max())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(pl.LightningModule):
    """Repeated blocks, run by `run_blocks` which tests override."""

    def __init__(self, num_blocks: int = 9, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.leave = nn.Linear(width, 5)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.leave(self.run_blocks(self.enter(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tiny_gpt2(**sizes: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        **{"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 60, "n_positions": 32, **sizes},
        bos_token_id=0,
        eos_token_id=0,
    )
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config).train()


def ids(samples: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(60, (samples, length), generator=torch.Generator().manual_seed(0))


def peak(events: EventList) -> int:
    return int(events.live_bytes().max())


def trace_step(
    module: nn.Module,
    batch: Any,
    options: StepOptions | None = None,
    emulation: Emulation | None = None,
    callbacks: Any = (),
    ranks: Ranks | None = None,
    **settings: Any,
) -> Trace:
    workload = Workload(module, batch, options or StepOptions(), callbacks, ranks=ranks)
    return trace.trace_step(TraceRequest(workload, emulation or Emulation(), **settings))


def trace_cpu(module: nn.Module, batch: Any, options: StepOptions | None = None, **rest: Any) -> Trace:
    return trace_step(module, batch, options or StepOptions(), Emulation("cpu"), **rest)


def really_run(module: nn.Module, batch: Any, options: StepOptions | None = None) -> EventList:
    """Events of two real steps of the module itself, which may be trained and need not be copyable."""
    gc.collect()  # what a trace left must not be freed in between
    recorder = EventRecorder(python_kernels=True)
    run_step(recorder, Workload(module, batch, options or StepOptions()))
    return recorder.result()


def faked(integers: Any, value: Any) -> Any:
    """A copy of a batch on fakes whose integers are known."""
    with _disable_current_modes():
        made = copy.deepcopy(value)
    turn_fake([made], integers.fake_mode, integers.remember_batch)
    return made


def same_events(first: EventList, second: EventList) -> bool:
    a, b = canonical(first), canonical(second)
    return (
        a.events.tolist() == b.events.tolist()
        and a.sizes.tolist() == b.sizes.tolist()
        and a.categories.tolist() == b.categories.tolist()
        and a.event_blocks.tolist() == b.event_blocks.tolist()
        and a.phases == b.phases
    )
