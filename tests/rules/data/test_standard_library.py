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
