import lightning.pytorch as pl
import torch

from lightning_memfit.data import RandomTokens
from lightning_memfit.models import SequenceClassifier
from tests.helpers.trainers import fit

CONFIG = {
    "model_type": "bert",
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 8,
}


def train(module: SequenceClassifier, precision: str = "32-true") -> pl.Trainer:
    tokens = RandomTokens(8, 6, batch_size=4, vocab_size=30, num_labels=3)
    return fit(module, loader=tokens, max_epochs=20, precision=precision)


def test_learns_the_classes_by_heart():
    torch.manual_seed(0)
    trainer = train(SequenceClassifier(CONFIG, num_labels=3, learning_rate=1e-2))
    assert trainer.callback_metrics["train_loss"] < 0.6  # log(3) = 1.1


def test_is_built_in_the_trainers_precision_and_only_once():
    module = SequenceClassifier(CONFIG, num_labels=3)
    assert module.model is None
    train(module, "bf16-true")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    built = module.model
    module.configure_model()
    assert module.model is built
    assert built.config.num_labels == 3
