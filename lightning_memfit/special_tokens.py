"""What a tokenizer puts around a text: the rule by which a pretrained model saw its texts, and by which it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Surroundings(NamedTuple):
    """Special tokens around a text."""

    before: list[int]
    """Such as the beginning of sequence; empty for many tokenizers."""
    after: list[int]
    """With the end of sequence among them."""


def surroundings(tokenizer: PreTrainedTokenizerBase, is_target: bool = False) -> Surroundings:
    """Return the special tokens that `tokenizer(text)` puts around a text, and the end of sequence if it puts none.

    Args:
        tokenizer: Any with an end-of-sequence token.
        is_target: What `tokenizer(text_target=text)` puts around a text that is to be written.

    Raises:
        ValueError: If the tokenizer doesn't leave a text's own tokens together.
    """
    name = "text_target" if is_target else "text"
    for probe in _probes(tokenizer):
        ids, bare = (
            list(tokenizer(**{name: probe}, add_special_tokens=special, verbose=False)["input_ids"])
            for special in (True, False)
        )
        if not bare:
            continue
        start = next((at for at in range(len(ids)) if ids[at : at + len(bare)] == bare), None)
        if start is None:
            break
        before, after = ids[:start], ids[start + len(bare) :]
        end = tokenizer.eos_token_id
        return Surroundings(before, after if end in after else [*after, end])
    raise ValueError(
        f"`tokenizer`: {type(tokenizer).__name__} changes the tokens of a text when it puts special tokens around it, "
        "so that texts can't be cut to a length. Use another tokenizer."
    )


def _probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Short texts, of which one has tokens in any vocabulary."""
    yield "a"
    special = set(tokenizer.all_special_ids)
    yield from (str(tokenizer.decode([token])) for token in range(min(len(tokenizer), 1000)) if token not in special)
