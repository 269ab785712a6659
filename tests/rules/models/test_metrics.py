import math

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit.models import CausalLM
from lightning_memfit.models.metrics import LossPerplexity, WeightedMean
from tests.helpers.trainers import quiet_trainer

TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 16, "vocab_size": 32}


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("kind", [WeightedMean, LossPerplexity])
def test_sums_stay_in_float32_when_their_module_is_converted(kind, precision):
    module = HalfPrecision(precision).convert_module(nn.ModuleList([kind()]))
    (metric,) = module
    for _ in range(2):  # a reset goes back to the converted defaults
        for _ in range(1000):
            metric.update(torch.tensor(0.75), 1)
        expected = 0.75 if kind is WeightedMean else math.exp(0.75)
        assert metric.compute().dtype == torch.float32
        assert metric.compute().item() == pytest.approx(expected, rel=1e-6)
        metric.reset()


def test_a_long_evaluation_in_bf16_logs_the_true_means(tmp_path):
    class Known(CausalLM):
        def _loss(self, batch):
            return batch["labels"].float().mean() / 10

    rows = [{"labels": torch.full((4,), number % 7)} for number in range(700)]
    trainer = quiet_trainer(default_root_dir=tmp_path, precision="bf16-true")
    logged = trainer.validate(Known(config=TINY), DataLoader(rows, batch_size=1), verbose=False)[0]
    assert logged["val_loss"] == pytest.approx(0.3, rel=1e-5)
    assert logged["val_perplexity"] == pytest.approx(math.exp(0.3), rel=1e-5)


def test_a_loss_that_is_no_number_is_not_left_out():
    mean = WeightedMean()
    mean.update(torch.tensor(2.0), 5)
    mean.update(torch.tensor(float("nan")), 5)
    assert math.isnan(mean.compute())
