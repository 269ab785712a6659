import json

import pytest

from lightning_memfit.data import PairData
from lightning_memfit.data.pairs import TokenizedPairs, set_languages
from lightning_memfit.data.standard_library import documented_functions
from lightning_memfit.data.tokenization import byte_tokenizer
from tests.helpers.framing import translating

EOS, PAD, ENG, DEU = 256, 257, 258, 259


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_texts_are_cut_or_padded_and_end():
    samples = TokenizedPairs([("abc", "de"), ("abcdefgh", "abcdefgh")], byte_tokenizer(), 6, 4)
    assert samples[0]["input_ids"].tolist() == [97, 98, 99, EOS, PAD, PAD]
    assert samples[0]["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    assert samples[0]["labels"].tolist() == [100, 101, EOS, -100]
    assert samples[1]["input_ids"].tolist() == [97, 98, 99, 100, 101, EOS]
    assert samples[1]["labels"].tolist() == [97, 98, 99, EOS]


def test_targets_are_tokenized_as_targets():
    tokenizer = set_languages(translating(), None, "deu")
    sample = TokenizedPairs([("ab", "cd")], tokenizer, 4, 4)[0]
    assert sample["input_ids"].tolist() == [ENG, *b"ab", EOS] == tokenizer("ab")["input_ids"]
    assert sample["labels"].tolist() == [DEU, *b"cd", EOS] == tokenizer(text_target="cd")["input_ids"]
    set_languages(tokenizer, "deu", "eng")
    sample = TokenizedPairs([("ab", "cd")], tokenizer, 4, 4)[0]
    assert (sample["input_ids"][0], sample["labels"][0]) == (DEU, ENG)


def test_languages_reach_the_samples(tmp_path):
    rows = [{"source": f"question {i}", "target": f"answer {i}"} for i in range(20)]
    options = {
        "num_workers": 0,
        "cache_dir": str(tmp_path / "cache"),
        "source_language": "deu",
        "target_language": "eng",
    }
    data = PairData(write(tmp_path / "pairs.jsonl", rows), "bytes", **options)
    data._tokenizer = translating()
    data.setup("fit")
    sample = next(iter(data.train_dataloader()))
    assert (sample["input_ids"][0, 0], sample["labels"][0, 0]) == (DEU, ENG)


@pytest.mark.parametrize(
    ("tokenizer", "languages", "message"),
    [
        (translating, (None, None), "marks languages, and `target_language` is not set"),
        (translating, ("fra", "deu"), "`source_language='fra'` is no language of the tokenizer"),
        (translating, (None, "fra"), "`target_language='fra'` is no language of the tokenizer"),
        (byte_tokenizer, ("eng", None), "`source_language='eng'`: the tokenizer has no marks for languages"),
    ],
)
def test_languages_that_are_not_there(tokenizer, languages, message):
    with pytest.raises(ValueError, match=message):
        set_languages(tokenizer(), *languages)


def test_pairs_of_a_file(tmp_path):
    rows = [{"q": f"question {i // 2}", "a": f"answer {i}"} for i in range(40)]
    options = {"source_column": "q", "target_column": "a", "cache_dir": str(tmp_path / "cache")}
    data = PairData(write(tmp_path / "pairs.jsonl", rows), "bytes", val_fraction=0.2, num_workers=0, **options)
    data.setup("fit")
    train, val = data.load_pairs()
    assert sorted(train + val) == sorted((row["q"], row["a"]) for row in rows)
    assert not {source for source, _ in train} & {source for source, _ in val}
    batch = next(iter(data.train_dataloader()))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (8, 128),
        "attention_mask": (8, 128),
        "labels": (8, 128),
    }


def test_functions_lose_their_documentation():
    functions = (
        'def f(x):\n    """Double x.\n\n    More."""\n    return 2 * x\n',
        "def g():\n    return 1\n",
        'def h():\n    """Nothing."""\n',
    )
    assert documented_functions("".join(functions)) == [
        ("def f(x):\n    return 2 * x", "Double x."),
        ("def h():\n    pass", "Nothing."),
    ]
