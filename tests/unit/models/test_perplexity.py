import torch
from torch.nn.functional import cross_entropy
from torchmetrics.text import Perplexity

from lightning_memfit.models.causal_lm import LossPerplexity


def test_equals_torchmetrics_over_batches_of_different_size():
    torch.manual_seed(0)
    ours, reference = LossPerplexity(), Perplexity(ignore_index=-100)
    for batch in (2, 5):
        logits, labels = torch.randn(batch, 7, 11), torch.randint(11, (batch, 7))
        labels[0, :3] = -100
        ours.update(cross_entropy(logits.flatten(0, 1), labels.flatten()), (labels != -100).sum())
        reference.update(logits, labels)
    torch.testing.assert_close(ours.compute(), reference.compute())
