"""Prompts are put into tokens as the texts of the training were."""

from types import SimpleNamespace

import pytest

from lightning_memfit.data.pairs import TokenizedPairs
from lightning_memfit.data.tokenization import byte_tokenizer, encode
from lightning_memfit.models import sampling
from lightning_memfit.models.sampling import continue_text
from tests.helpers.framing import BOS, EOS, with_bos


@pytest.fixture
def read(monkeypatch):
    """Return the tokens that a model gets."""

    def ids_of(tokenizer, prompt, is_encoder_decoder):
        monkeypatch.setattr(sampling, "continue_ids", lambda _network, _tokenizer, ids, *_: seen.append(ids) or [])
        seen = []
        network = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder))
        continue_text(network, tokenizer, prompt, 1, 0, 1)
        return seen[0]

    return ids_of


@pytest.mark.parametrize("pattern", ["<|bos|> $A", "<|bos|> $A <|endoftext|>"])
def test_a_prompt_begins_as_documents_begin(read, pattern):
    tokenizer = with_bos(pattern)
    assert read(tokenizer, "hi", False) == [BOS, *b"hi"] == encode(tokenizer, ["hi"])[0].tolist()[:-1]
    assert read(tokenizer, "", False) == [BOS]


def test_without_a_beginning_a_document_begins_behind_the_end_of_another(read):
    assert read(byte_tokenizer(), "hi", False) == list(b"hi")
    assert read(byte_tokenizer(), "", False) == [EOS]


def test_an_encoder_reads_a_prompt_as_it_read_sources(read):
    tokenizer = with_bos("<|bos|> $A <|endoftext|>")
    source = TokenizedPairs([("hi", "ho")], tokenizer, 4, 4)[0]["input_ids"].tolist()
    assert read(tokenizer, "hi", True) == [BOS, *b"hi", EOS] == source
