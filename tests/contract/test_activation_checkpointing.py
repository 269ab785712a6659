import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.checkpointing.apply import CheckpointedForward
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.contract.runs import LanguageModel, assert_same_weights, fit, loader, trainer


class Watch(pl.Callback):
    """Remembers how many blocks are checkpointed while training."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        blocks = pl_module.model.transformer.h
        pl_module.seen["checkpointed"] = [isinstance(vars(b).get("forward"), CheckpointedForward) for b in blocks]


@pytest.fixture(scope="module")
def plain():
    return fit([Watch()])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [True] * 4),
        ({"mode": "none"}, [False] * 4),
        ({"mode": "every", "every": 2}, [True, False, True, False]),
        ({"mode": "selective", "keep": ["matmul", "attention"]}, [True] * 4),
        ({"choices": ["none", "full", "keep_attention", "none"]}, [False, True, True, False]),
        ({"blocks": "GPT2Block"}, [True] * 4),
        ({"blocks": ["model.transformer.h.1"]}, [False, True, False, False]),
    ],
)
def test_losses_and_weights_are_those_of_the_plain_run(plain, arguments, expected):
    ours = fit([ActivationCheckpointing(**arguments), Watch()])
    assert ours.seen["checkpointed"] == expected
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)
    assert vars(ours).keys() == vars(plain).keys()
    assert not any("forward" in vars(m) for m in ours.modules())


def test_model_built_in_configure_model():
    ours = fit([ActivationCheckpointing(), Watch()], lambda: LanguageModel(late=True))
    assert ours.seen["checkpointed"] == [True] * 4


def test_says_in_one_line_what_it_did(caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit([ActivationCheckpointing(mode="every", every=3)])
    said = [record.message for record in caplog.records if "ActivationCheckpointing" in record.message]
    assert said == ["ActivationCheckpointing: mode every (3), 4 x GPT2Block found, 2 checkpointed"]


def test_caches_are_on_again_afterwards():
    with pytest.warns(UserWarning, match="use_cache"):
        ours = fit([ActivationCheckpointing()], lambda: LanguageModel(use_cache=True))
    assert ours.model.config.use_cache is True


def test_hugging_face_checkpointing_is_refused_and_nothing_stays():
    model = LanguageModel()
    model.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        trainer([ActivationCheckpointing()]).fit(model, loader())
    assert "configure_model" not in vars(model)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="mode='most'"):
        ActivationCheckpointing(mode="most")
    with pytest.raises(ValueError, match="`choices` replaces"):
        ActivationCheckpointing(mode="none", choices=["full"])
    with pytest.raises(ValueError, match="1 entries for 4 blocks"):
        fit([ActivationCheckpointing(choices=["full"])])


@pytest.mark.parametrize("first", [0, 1])
def test_averaged_weights_in_both_orders(first):
    averaging = pytest.importorskip("lightning.pytorch.callbacks").EMAWeightAveraging
    callbacks = [ActivationCheckpointing(), averaging(decay=0.9)]
    ours = fit(callbacks[first:] + callbacks[:first])
    assert_same_weights(ours, fit([averaging(decay=0.9)]))
