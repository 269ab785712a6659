import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightning_memfit.data.pairs import TokenizedPairs
from lightning_memfit.data.tokenization import byte_tokenizer
from lightning_memfit.models import Seq2SeqLM
from lightning_memfit.models.trained import network_from_checkpoint
from tests.helpers.continued import continued
from tests.helpers.trainers import quiet_trainer

TINY = {
    "model_type": "blenderbot",
    "vocab_size": 258,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 16,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "decoder_start_token_id": 256,
    "dropout": 0.0,
}
PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("a long question", "yes")]


class Pairs(pl.LightningDataModule):
    source_length, target_length = 12, 8

    def train_dataloader(self):
        return DataLoader(TokenizedPairs(PAIRS, byte_tokenizer(), self.source_length, self.target_length), batch_size=2)

    val_dataloader = predict_dataloader = train_dataloader


def make_trainer(tmp_path, **options):
    return quiet_trainer(**{"default_root_dir": tmp_path, "num_sanity_val_steps": 0} | options)


def test_loss_is_the_models_own_over_predicted_tokens_alone(tmp_path):
    module, trainer = Seq2SeqLM(config=TINY), make_trainer(tmp_path)
    result = trainer.validate(module, datamodule=Pairs(), verbose=False)[0]
    total = count = 0.0
    for batch in Pairs().val_dataloader():
        start = torch.full((2, 1), 256)
        decoder_ids = torch.cat([start, batch["labels"][:, :-1].masked_fill(batch["labels"][:, :-1] == -100, 257)], 1)
        with torch.no_grad():
            logits = module.network(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=decoder_ids
            ).logits
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        )
        count += int((batch["labels"] != -100).sum())
    assert result["val_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.nightly
def test_learns_its_pairs_and_writes_what_it_read(tmp_path):
    pl.seed_everything(0, verbose=False)
    module = Seq2SeqLM(config=TINY, learning_rate=5e-3, weight_decay=0.0)
    trainer = make_trainer(tmp_path, max_steps=300)
    trainer.fit(module, datamodule=Pairs())
    assert float(trainer.callback_metrics["val_loss"]) < 0.1
    assert continued(module.network, byte_tokenizer(), "two") == "zwei"

    saved = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(saved)
    again = network_from_checkpoint(saved)
    assert continued(again, byte_tokenizer(), "one") == "eins"
    exported = module.export(tmp_path / "out", byte_tokenizer())
    network, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert continued(network, tokenizer, "three") == "drei"
