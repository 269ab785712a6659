"""A budget for blocks that can't be given every choice."""

import pytest
import torch

from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.contract.runs import LanguageModel, fit


class ChangesProducts(torch.nn.Module):
    """A block that adds to a product in place, so that products can't be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False)

    def forward(self, x):
        y = self.second(self.first(x).tanh())
        y += x
        return y.tanh()


class WithChangedProducts(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        blocks = [ChangesProducts() for _ in range(6)]
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 16), *blocks, torch.nn.Linear(16, 64))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.detach().clone())
        return loss


@pytest.mark.nightly
def test_choices_that_blocks_can_not_be_given_are_left_out():
    with pytest.raises(Exception, match="changed in place"):
        fit([ActivationCheckpointing("selective", keep=["matmul"])], WithChangedProducts)
    callback = ActivationCheckpointing(budget="90%")
    module = fit([callback], WithChangedProducts)
    assert set(callback.resolved.plan.choices) <= {"none", "full", "keep_attention"}
    assert "full" in callback.resolved.plan.choices
    assert torch.equal(torch.stack(module.losses), torch.stack(fit([], WithChangedProducts).losses))
