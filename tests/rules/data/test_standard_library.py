import numpy as np
import pytest
import torch

from lightning_memfit.data import StandardLibraryText
from lightning_memfit.data.standard_library import read_standard_library


def test_the_library_is_there_and_nothing_else():
    texts = read_standard_library()
    assert len(texts) > 300
    assert all(texts)
    assert texts == read_standard_library()


def test_blocks_and_split():
    data = StandardLibraryText(max_files=40, batch_size=4, num_workers=0)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (4, 256)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert len(data.val_dataloader().dataset) > 0
    assert data.vocab_size == 258


def test_split_is_by_file_and_repeatable():
    first, second = (StandardLibraryText(max_files=40).load_tokens() for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    assert sum((tokens == 256).sum() for tokens in first) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"sequence_length": 1}, "`sequence_length=1` must be at least 2"),
        ({"num_workers": -1}, "`num_workers=-1`"),
        ({"val_fraction": 1.5}, "`val_fraction=1.5` must lie between 0 and 1"),
        ({"max_files": 1}, "`max_files=1` must be at least 2"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        StandardLibraryText(**arguments)
