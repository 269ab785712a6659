"""A small Lightning run to apply techniques to."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.contract.checkpointing.models import gpt2
from tests.helpers.trainers import quiet_trainer


class StepsOn:
    """Before a class of torch: reads gradients after the step of that class, of which torch runs the hooks, too."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.05)
        return loss


class LanguageModel(pl.LightningModule):
    """Tiny GPT-2 with dropout that remembers its losses; `configure` makes what `configure_optimizers` returns."""

    def __init__(self, configure: Callable[[Any], Any] | None = None, late: bool = False, **config: Any) -> None:
        super().__init__()
        self.configure = configure
        self.config = config
        self.model = None if late else gpt2(**config)
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = gpt2(**self.config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        if self.configure is not None:
            return self.configure(self)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(num_batches: int = 6) -> DataLoader[Any]:
    tokens = torch.randint(0, 64, (2 * num_batches, 16), generator=torch.Generator().manual_seed(3))
    return DataLoader(tokens, batch_size=2)


def trainer(callbacks: Sequence[pl.Callback] = (), **kwargs: Any) -> pl.Trainer:
    return quiet_trainer(*callbacks, **{"max_steps": 4, **kwargs})


def fit(callbacks: Sequence[pl.Callback] = (), module: Any = None, ckpt_path: Any = None, **kwargs: Any) -> Any:
    """Train from fixed seeds; the module keeps its losses and gets the trainer as `ran`."""
    pl.seed_everything(0, verbose=False)
    module = LanguageModel() if module is None else module()
    run = trainer(callbacks, **kwargs)
    run.fit(module, loader(), ckpt_path=ckpt_path)
    module.seen["trainer"] = run
    return module


def assert_same_weights(first: Any, second: Any) -> None:
    for (name, a), (_, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
