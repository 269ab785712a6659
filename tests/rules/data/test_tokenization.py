import numpy as np
import pytest

from lightning_memfit.data.tokenization import (
    byte_tokenizer,
    encode,
    tokenizer_fingerprint,
)
from tests.helpers.framing import BOS, EOS, framed, with_bos

TEXT = "def naïve(x):\n\treturn '日本 <|endoftext|>'\n"


def test_byte_ids_are_the_bytes():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 258
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    plain = "".join(chr(code) for code in range(1, 0x500))
    assert tokenizer(plain)["input_ids"] == list(plain.encode())
    assert tokenizer.decode(list(plain.encode())) == plain


def test_encode_takes_special_tokens_in_a_text_as_text():
    [ids] = encode(byte_tokenizer(), [TEXT])
    assert ids.dtype == np.uint16
    assert ids.tolist() == [*TEXT.encode(), 256]


@pytest.mark.parametrize("pattern", ["<|bos|> $A", "<|bos|> $A <|endoftext|>"])
def test_documents_begin_as_the_tokenizer_begins_texts_and_end_once(pattern):
    """Llama 3 and Gemma have seen no text without its beginning; some tokenizers end texts by themselves."""
    tokenizer = with_bos(pattern)
    assert tokenizer("hi")["input_ids"][:3] == [BOS, *b"hi"]
    assert [ids.tolist() for ids in encode(tokenizer, ["hi", "you"])] == [[BOS, *b"hi", EOS], [BOS, *b"you", EOS]]
    assert encode(tokenizer, ["a<|bos|>b"])[0].tolist() == [BOS, *b"a", BOS, *b"b", EOS]


def test_fingerprint_knows_what_is_put_around_texts_and_what_templates_call_special_tokens():
    bare, begun = framed(with_bos(), "$A"), with_bos()
    assert tokenizer_fingerprint(bare) != tokenizer_fingerprint(begun)
    renamed = with_bos()
    renamed.bos_token = renamed.pad_token
    assert tokenizer_fingerprint(renamed) != tokenizer_fingerprint(begun)
