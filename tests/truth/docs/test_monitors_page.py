"""The guide to monitors names everything that they log and write."""

import re
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemoryLimit, MemoryMonitor, OutOfMemoryReport
from tests.helpers.trainers import quiet_trainer
from tests.rules.measure.test_monitor import train

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "monitors.md").read_text()


@pytest.mark.parametrize("limited", [False, True])
def test_every_figure_that_is_logged_has_a_row(tmp_path: Path, limited: bool) -> None:
    trainer = train(tmp_path, MemoryMonitor(every_n_steps=1), *([MemoryLimit("8MiB")] if limited else []))
    figures = {name for name in trainer.callback_metrics if name.startswith(("memory/", "throughput/"))}
    assert "memory/activation_peak_gib" in figures
    for name in figures:
        category = re.fullmatch(r"memory/(buffer|gradient|optimizer_state)_gib", name)
        peak = re.fullmatch(r"memory/\w+_peak_gib", name)
        assert f"`{name}`" in PAGE or (category and f"`{category[1]}`" in PAGE) or peak, name


class Classifier(L.LightningModule):
    """The module whose run the page explains."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(32, width)
        layer = torch.nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, depth)
        self.head = torch.nn.Linear(width, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.head(self.encoder(self.embed(inputs)).mean(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.nightly
def test_the_explanation_shown_is_what_is_said(tmp_path: Path) -> None:
    report = OutOfMemoryReport()
    trainer = quiet_trainer(report, MemoryLimit("160MiB"), max_epochs=1, default_root_dir=tmp_path)
    data = TensorDataset(torch.randn(64, 16, 32), torch.randint(0, 10, (64,)))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Classifier(), DataLoader(data, batch_size=64))
    assert report.text is not None
    assert f"```\nOutOfMemoryReport: {report.text}\n```" in PAGE, f"docs/guides/monitors.md should show:\n{report.text}"
