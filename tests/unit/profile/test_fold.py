import pytest
import torch

from lightning_memfit.profile.repeat import TRACED_BLOCKS, fold_blocks

from .modules import Stack


def test_the_first_four_and_the_last_block_stay_in_order():
    module = Stack(num_blocks=9)
    blocks = list(module.blocks)
    fold = fold_blocks(module)
    assert (fold.num_blocks, fold.block_class, fold.is_shortened) == (9, "Block", True)
    assert list(fold.blocks) == [*blocks[:4], blocks[8]] == list(module.blocks)
    assert len(fold.blocks) == TRACED_BLOCKS


def test_without_shortening_all_stay():
    module = Stack(num_blocks=9)
    fold = fold_blocks(module, shorten=False)
    assert fold.blocks == tuple(module.blocks)
    assert not fold.is_shortened


def test_a_module_without_blocks_has_none():
    fold = fold_blocks(torch.nn.Linear(2, 2))
    assert (fold.blocks, fold.num_blocks, fold.is_shortened) == ((), 0, False)


def wider(block):
    block.up = torch.nn.Linear(16, 48)


def frozen(block):
    block.up.requires_grad_(False)


def with_a_setting(block):
    block.window = 128


def numbered_elsewhere(block):
    block.layer_id = 77


def in_half_precision(block):
    block.up.bfloat16()


@pytest.mark.parametrize("change", [wider, frozen, with_a_setting, numbered_elsewhere, in_half_precision])
def test_one_other_block_keeps_them_all(change):
    module = Stack(num_blocks=9)
    change(module.blocks[5])
    assert not fold_blocks(module).is_shortened


def test_the_first_block_and_a_blocks_own_number_may_differ():
    module = Stack(num_blocks=9)
    with_a_setting(module.blocks[0])
    for index, block in enumerate(module.blocks):
        block.layer_id = index
    assert fold_blocks(module).is_shortened


class Counts(Stack):
    def run_blocks(self, x):
        for block, _ in zip(self.blocks, range(9), strict=True):
            x = block(x)
        return x


class CountsElsewhere(Stack):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for _, p in zip(range(999), self.parameters(), strict=False)])


def test_code_above_that_counts_the_blocks_keeps_them_all():
    assert not fold_blocks(Counts(num_blocks=9)).is_shortened
    assert fold_blocks(CountsElsewhere(num_blocks=9)).is_shortened
    above = torch.nn.ModuleDict({"below": Stack(num_blocks=9)})
    assert fold_blocks(above).is_shortened
    assert not fold_blocks(torch.nn.ModuleDict({"below": Counts(num_blocks=9)})).is_shortened


def test_a_class_whose_source_is_unknown_keeps_them_all():
    kind = type("Built", (Stack,), {})
    assert not fold_blocks(kind(num_blocks=9)).is_shortened
