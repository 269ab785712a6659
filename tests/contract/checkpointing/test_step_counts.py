"""What a steady step costs beside torch's own checkpoint: Python calls and operators, the same on every machine."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_memfit.checkpointing.apply import apply_checkpointing
from lightning_memfit.checkpointing.policies import kept_operators
from lightning_memfit.checkpointing.recompute import Knowledge
from lightning_memfit.memory.ledger import StorageLedger
from tests.contract.checkpointing.models import gpt2

pytestmark = pytest.mark.own_process

LAYERS = 12
IDS = torch.randint(0, 64, (2, 16))


class Operators(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def num_calls(step):
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return number


def costs(checkpointed, autocast=False):
    """Python calls and operators of a step."""
    torch.manual_seed(0)
    model = gpt2(n_layer=LAYERS).train()
    checkpointed(list(model.transformer.h))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        model.zero_grad()

    for _ in range(2):
        step()
    calls = num_calls(step)
    with Operators() as operators:
        step()
    return calls, operators.number


def ours(blocks, choice="full"):
    apply_checkpointing(blocks, [choice] * len(blocks))


def torchs(blocks, **options):
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def releasing(blocks):
    """With a step in backward, where torch's own way is taken."""
    for parameter in nn.ModuleList(blocks).parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)


def test_full_recomputation_takes_less_than_half_of_torchs_calls_and_no_more_operators():
    calls, operators = costs(ours)
    torch_calls, _ = costs(torchs)
    _, torch_operators = costs(partial(torchs, early_stop=False))
    assert calls <= 0.5 * torch_calls
    assert operators <= torch_operators


@pytest.mark.parametrize("case", ["autocast", "released", "device", "written"])
def test_where_torchs_own_way_is_taken_it_costs_as_much(case, monkeypatch):
    def first(blocks):
        if case == "released":
            releasing(blocks)
        if case == "written":
            for block in blocks:
                block.ln_1.register_forward_pre_hook(count)

    def count(module, args):
        module.count = getattr(module, "count", 0) + 1

    if case == "device":  # its random state is kept beside that of the CPU

        def look(known, inputs):
            known.devices = (torch.device("cpu"), torch.device("cpu", 0))

        monkeypatch.setattr(Knowledge, "look_at_devices", look)
        monkeypatch.setattr(Knowledge, "takes_light", lambda known, args, kwargs: False)
    calls, operators = costs(lambda blocks: [first(blocks), ours(blocks)], case == "autocast")
    torch_calls, torch_operators = costs(lambda blocks: [first(blocks), torchs(blocks)], case == "autocast")
    assert calls <= (1.3 if case == "written" else 1.1) * torch_calls
    assert operators == torch_operators


@pytest.mark.parametrize("choice", ["keep_attention", "keep_matmul", "keep_matmul_attention"])
def test_selective_choices_cost_what_torchs_policy_costs(choice):
    calls, operators = costs(partial(ours, choice=choice))
    contexts = partial(create_selective_checkpoint_contexts, list(kept_operators(choice)))
    torch_calls, torch_operators = costs(partial(torchs, context_fn=contexts))
    assert calls <= 1.15 * torch_calls
    assert operators == torch_operators


@pytest.mark.parametrize("choice", ["full", "keep_matmul"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_first_batch_needs_at_most_one_blocks_activations_more(choice, num_parts):
    """And a steady step what torch's own way needs, to the byte."""

    ids = IDS.repeat(8, 2)  # activations larger than weights

    def peaks(checkpointed):
        torch.manual_seed(0)
        model = gpt2(n_layer=6, n_embd=64).train()
        checkpointed(list(model.transformer.h))
        found = []
        for _ in range(3):
            with StorageLedger() as ledger:
                ledger.track_module(model)
                for _ in range(num_parts):
                    model(input_ids=ids, labels=ids).loss.backward()
                found.append(ledger.peak_bytes)
            ledger.close()
            model.zero_grad()
        return found

    one_block = (peaks(lambda blocks: None)[-1] - peaks(torchs)[-1]) / 5
    contexts = partial(create_selective_checkpoint_contexts, list(kept_operators(choice)))
    torch_peak = peaks(partial(torchs, **({} if choice == "full" else {"context_fn": contexts})))[-1]
    first, *steady = peaks(partial(ours, choice=choice))
    assert steady == [torch_peak, torch_peak]
    assert first <= torch_peak + one_block
