"""A model that was trained on pairs reads and writes the languages of its training."""

from cli import trained
from tests.helpers.framing import translating


def test_the_languages_of_the_training_are_set(monkeypatch):
    asked = {"tokenizer": "nllb", "source_language": "deu", "target_language": "eng"}
    monkeypatch.setattr(trained, "load_verified", lambda _: {"datamodule_hyper_parameters": asked})
    monkeypatch.setattr(trained, "load_tokenizer", lambda _: translating())
    monkeypatch.setattr(trained, "network_from_checkpoint", lambda _: None)
    tokenizer = trained.load_trained("some.ckpt", None).tokenizer
    assert tokenizer.decode(tokenizer("a")["input_ids"]) == "deua<|endoftext|>"
    assert tokenizer.decode(tokenizer(text_target="a")["input_ids"]) == "enga<|endoftext|>"
