from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memfit.models.causal_lm import CausalLM
from lightning_memfit.profile.events import OUTSIDE, AlignmentError, EventList
from lightning_memfit.profile.repeat import TRACED_BLOCKS, fold_blocks, unroll
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.profile.work import grouped
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.helpers.modules import LanguageModel
from tests.truth.profile.modules import Stack, ids, peak, really_run, same_events, tiny_gpt2, trace_cpu, trace_step

BATCH = torch.randn(24, 16)


class SgdStack(Stack):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.nightly_cases("scaled", "SGD", "8-bit")
@pytest.mark.parametrize(
    ("device", "module", "options", "callbacks"),
    [
        ("cpu", Stack, StepOptions(), ()),
        ("cuda", Stack, StepOptions("bf16-mixed", accumulate_grad_batches=4), (ActivationCheckpointing(),)),
        ("cuda", Stack, StepOptions("16-mixed", gradient_clip_val=1.0), ()),
        ("cpu", SgdStack, StepOptions("bf16-true"), ()),
        ("cpu", Stack, StepOptions("bf16-mixed"), (ActivationCheckpointing(), Optimizer8bit())),
    ],
    ids=["plain", "checkpointed and accumulated", "scaled and clipped", "SGD", "8-bit"],
)
def test_five_unrolled_blocks_are_the_full_trace_event_for_event(device, module, options, callbacks):
    module = module(num_blocks=9)
    shortened, full = (
        trace_step(module, BATCH, options, Emulation(device), callbacks, shorten=shorten) for shorten in (True, False)
    )
    assert (shortened.num_blocks, shortened.traced_blocks) == (9, TRACED_BLOCKS)
    assert (full.num_blocks, full.traced_blocks) == (9, 9)
    if options.gradient_clip_val:  # all norms are joined: four bytes per parameter
        assert peak(shortened.events) == pytest.approx(peak(full.events), abs=512)
    else:
        assert same_events(shortened.events, full.events)
    assert shortened.flops == full.flops
    assert shortened.parameters == full.parameters


@pytest.mark.nightly
def test_a_transformer_unrolls_to_its_full_trace():
    module = LanguageModel(tiny_gpt2(n_layer=8))
    shortened, full = (
        trace_step(module, ids(), StepOptions("bf16-mixed"), shorten=shorten) for shorten in (True, False)
    )
    assert shortened.traced_blocks == TRACED_BLOCKS
    assert same_events(shortened.events, full.events)


LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.nightly_cases("lora-bf16-mixed-False-llama", "lora_8bit", "qlora")
@pytest.mark.parametrize(
    ("technique", "precision", "checkpointed", "model"),
    [("lora", "bf16-mixed", False, "llama"), ("qlora", "bf16-mixed", True, "llama"),
     ("qlora", "bf16-mixed", False, "gpt2"), ("qlora", "bf16-true", False, "built later"),
     ("lora_8bit", "32-true", True, "built later")],
)  # fmt: skip
def test_frozen_and_quantized_blocks_unroll_to_their_full_trace(technique, precision, checkpointed, model):
    """What quantization makes for each block belonged to no block; and no gradient told when the first one's backward
    ended, so that what the optimizer made for the others counted as its own. GPT-2 holds its matrices transposed: the
    views that turned them round came before the first event of their block."""
    module: Any = (
        CausalLM(config=LLAMA)
        if model == "built later"
        else LanguageModel(tiny_gpt2(n_layer=8) if model == "gpt2" else LlamaForCausalLM(LlamaConfig(**LLAMA)))
    )
    batch: Any = {"input_ids": ids(), "labels": ids()}
    callbacks = Setting().choose(technique).traced_callbacks()
    callbacks += (ActivationCheckpointing(),) if checkpointed else ()
    shortened, full = (
        trace_step(module, batch, StepOptions(precision), callbacks=callbacks, shorten=shorten, check_assumptions=False)
        for shorten in (True, False)
    )
    assert (shortened.num_blocks, shortened.traced_blocks, full.traced_blocks) == (8, TRACED_BLOCKS, 8)
    assert same_events(until_end(shortened.events), until_end(full.events))
    assert (shortened.flops, shortened.host, shortened.parameters) == (full.flops, full.host, full.parameters)
    for phase in ("forward", "backward"):
        assert set(grouped(shortened.work)[phase]) == set(grouped(full.work)[phase])


def until_end(events):
    """What happens until the module is given back, when garbage goes at any moment."""
    end = next(at for at, name in events.phases if name == "end")
    return replace(events, events=events.events[:end], event_blocks=events.event_blocks[:end])


def set_up(num_blocks, scratch, ahead=False):
    """A set-up in which every block makes a storage and, belonging to no block, scratch memory of some bytes, after it
    or ahead of it."""
    events, blocks, sizes = [], [], []
    for block in range(num_blocks):
        made = ((block, 100), (OUTSIDE, scratch[block]))
        for owner, size in reversed(made) if ahead else made:
            sizes.append(size)
            events.append(len(sizes))
            blocks.append(owner)
        events.append(1 - len(sizes) if ahead else -len(sizes))
        blocks.append(OUTSIDE)
    integers = {name: np.array(values) for name, values in (("events", events), ("event_blocks", blocks))}
    zeros, phases = np.zeros(len(sizes), dtype=np.int64), ((len(events), "forward"),)
    return EventList(**integers, sizes=np.array(sizes), categories=zeros, sites=zeros, site_names=("x",), phases=phases)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_passes_while_blocks_are_set_up_is_repeated_with_them(ahead):
    assert same_events(unroll(set_up(TRACED_BLOCKS, [8] * 5, ahead), 9), set_up(9, [8] * 9, ahead))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("scratch", [[8, 8, 8, 9, 8], [8, 8, 9, 8, 8]])
def test_what_passes_unlike_at_the_blocks_is_refused(scratch, ahead):
    with pytest.raises(AlignmentError):
        unroll(set_up(TRACED_BLOCKS, scratch, ahead), 9)


def test_what_passes_between_blocks_is_repeated_in_the_set_up_only():
    """In forward and backward its work would not be counted with the blocks'."""
    working = replace(set_up(TRACED_BLOCKS, [8] * 5), phases=((0, "forward"),))
    with pytest.raises(AlignmentError, match="belong to no block alone"):
        unroll(working, 9)


class EveryThird(Stack):
    """Work between the blocks, at some of them."""

    def __init__(self, num_blocks: int = 9) -> None:
        super().__init__(num_blocks)
        for index, block in enumerate(self.blocks):
            block.id = index

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x if block.id % 3 else x.exp())
        return x


class Scaled(Stack):
    """Work between the blocks, at all of them, as where the residual sum is the parent's."""

    def run_blocks(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class AtTheEighth(Stack):
    """A trace of five blocks would never see this."""

    def run_blocks(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x) if index != 7 else block(x).exp() * block(x).exp()
        return x


class Skips(Stack):
    """A U-Net's way: the first half hands its outputs to the second, last one first."""

    def run_blocks(self, x):
        half = len(self.blocks) // 2
        skipped = []
        for index, block in enumerate(self.blocks):
            x = block(x + skipped.pop() if index > half else x)
            if index < half:
                skipped.append(x)
        return x


class Flattens(Stack):
    """All gradients in one tensor."""

    def on_before_optimizer_step(self, optimizer):
        self.norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()


@pytest.mark.nightly_cases("Scaled", "AtTheEighth", "Flattens")
@pytest.mark.parametrize("module", [EveryThird, Scaled, AtTheEighth, Skips, Flattens])
def test_blocks_that_are_not_all_are_traced_one_by_one(module):
    module = module(num_blocks=9)
    found = trace_cpu(module, BATCH)
    assert found.traced_blocks == 9
    assert peak(found.events) == peak(really_run(module, BATCH))


def test_few_blocks_are_not_shortened():
    assert trace_cpu(Stack(num_blocks=6), BATCH).traced_blocks == 6


def test_unlike_blocks_are_refused_by_the_events_alone():
    """What the parent does between two blocks belongs to neither."""
    events = trace_cpu(Scaled(num_blocks=5), BATCH).events
    with pytest.raises(AlignmentError):
        unroll(events, 12)


def test_temporaries_that_outlive_their_block_do_not_pile_up():
    """A loop over parameters holds one block's last temporaries until the next block's are made, never all of them."""
    module, batch = Stack(num_blocks=30, width=32), torch.randn(1, 32)
    shortened = trace_cpu(module, batch)
    assert shortened.traced_blocks == TRACED_BLOCKS
    assert peak(shortened.events) == peak(really_run(module, batch))


def is_shortened(fold):
    return fold.num_blocks > len(fold.blocks)


def test_the_first_four_and_the_last_block_stay_in_order():
    module = Stack(num_blocks=9)
    blocks = list(module.blocks)
    fold = fold_blocks(module)
    assert (fold.num_blocks, fold.block_class, is_shortened(fold)) == (9, "Block", True)
    assert list(fold.blocks) == [*blocks[:4], blocks[8]] == list(module.blocks)
    assert len(fold.blocks) == TRACED_BLOCKS


def test_a_module_without_blocks_has_none():
    fold = fold_blocks(torch.nn.Linear(2, 2))
    assert (fold.blocks, fold.num_blocks, is_shortened(fold)) == ((), 0, False)


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
    assert not is_shortened(fold_blocks(module))


def test_the_first_block_and_a_blocks_own_number_may_differ():
    module = Stack(num_blocks=9)
    with_a_setting(module.blocks[0])
    for index, block in enumerate(module.blocks):
        block.layer_id = index
    assert is_shortened(fold_blocks(module))


class Counts(Stack):
    def run_blocks(self, x):
        for block, _ in zip(self.blocks, range(9), strict=True):
            x = block(x)
        return x


class CountsElsewhere(Stack):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for _, p in zip(range(999), self.parameters(), strict=False)])


def test_code_above_that_counts_the_blocks_keeps_them_all():
    assert not is_shortened(fold_blocks(Counts(num_blocks=9)))
    assert is_shortened(fold_blocks(CountsElsewhere(num_blocks=9)))
    above = torch.nn.ModuleDict({"below": Stack(num_blocks=9)})
    assert is_shortened(fold_blocks(above))
    assert not is_shortened(fold_blocks(torch.nn.ModuleDict({"below": Counts(num_blocks=9)})))


def test_a_class_whose_source_is_unknown_keeps_them_all():
    kind = type("Built", (Stack,), {})
    assert not is_shortened(fold_blocks(kind(num_blocks=9)))
