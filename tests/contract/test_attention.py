import pytest
from torch import nn

from lightning_memfit.techniques.attention import AttentionKernel, outermost_pretrained
from tests.contract.checkpointing.models import t5
from tests.contract.peaks import assert_predicted_peak_is_measured
from tests.contract.runs import LanguageModel, fit


def test_the_implementation_is_in_use_and_then_the_models_own_again():
    seen = []

    class Watched(LanguageModel):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(self.model.config._attn_implementation)

    ours = fit([AttentionKernel("eager")], Watched)
    assert set(seen) == {"eager"}
    assert ours.model.config._attn_implementation == "sdpa"


@pytest.mark.nightly
def test_whole_scores_take_the_memory_that_fused_kernels_save():
    fused, whole = (assert_predicted_peak_is_measured([AttentionKernel(name)]) for name in ("sdpa", "eager"))
    assert fused < whole


def test_outermost_models_only():
    model = nn.ModuleDict({"first": t5(), "second": nn.Linear(2, 2)})
    assert outermost_pretrained(model) == [model["first"]]


def test_other_modules_are_refused():
    class Flat(LanguageModel):
        def configure_model(self):
            self.model = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="no Hugging Face model"):
        fit([AttentionKernel()], Flat)
