import pickle

import numpy as np
import pytest

from lightning_memfit.data.text import PackedBlocks


def test_blocks_are_consecutive_and_the_rest_is_left_out():
    blocks = PackedBlocks(np.arange(10, dtype=np.uint16), sequence_length=4)
    assert len(blocks) == 2
    assert blocks[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert blocks[1]["labels"].tolist() == [4, 5, 6, 7]
    with pytest.raises(IndexError):
        blocks[2]


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"has 3 tokens, less than one block of `sequence_length=4`"):
        PackedBlocks(np.arange(3), sequence_length=4)


def test_a_mapped_file_is_mapped_again_by_workers(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(1_000_000, dtype=np.uint16))
    blocks = PackedBlocks(np.load(tmp_path / "tokens.npy", mmap_mode="r"), sequence_length=4)
    data = pickle.dumps(blocks)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert isinstance(copy.tokens, np.memmap)
    assert copy[5]["input_ids"].tolist() == blocks[5]["input_ids"].tolist()
