import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.memory import Category
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.work import OperatorWork
from tests.truth.profile.modules import Block

MIDDLE = (1, 2)
"""The blocks at the edges get what passes between them and their neighbours."""


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, 16), nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def recorded():
    """Two AdamW steps, recorded."""
    torch.manual_seed(0)
    module = Four()
    optimizer = torch.optim.AdamW(module.parameters())
    recorder = EventRecorder(tuple(module.blocks), cuda=(9, 0))
    recorder.track_module(module)
    recorder.track_optimizer(optimizer)
    x = torch.randn(4, 8)
    recorder.track(x, Category.INPUT, "batch")
    with recorder:
        for _ in range(2):
            recorder.phase("forward")
            loss = module(x).square().mean()
            optimizer.zero_grad()
            recorder.phase("backward")
            loss.backward()
            recorder.phase("step")
            optimizer.step()
            del loss
        recorder.phase("end")
    recorder.close()
    return module, recorder, recorder.result()


def bytes_of(events, index, category):
    return events.breakdown_at(index).get(category)


def test_categories_add_up_to_the_module_and_its_optimizer(recorded):
    module, _, events = recorded
    weights = sum(p.nbytes for p in module.parameters())
    end = len(events) - 1
    assert bytes_of(events, end, Category.PARAMETER) == weights
    assert bytes_of(events, end, Category.GRADIENT) == weights
    assert bytes_of(events, end, Category.OPTIMIZER_STATE) == 2 * weights
    assert bytes_of(events, end, Category.INPUT) == 4 * 8 * 4
    assert bytes_of(events, end, Category.TEMPORARY) == 0


def test_phases_follow_each_other(recorded):
    _, _, events = recorded
    assert [name for _, name in events.phases] == ["forward", "backward", "step"] * 2 + ["end"]
    assert [at for at, _ in events.phases] == sorted(at for at, _ in events.phases)


def test_blocks_own_their_parameters_gradients_states_and_activations(recorded):
    module, _, events = recorded
    allocated = events.events > 0
    for block in MIDDLE:
        numbers = events.storages[allocated & (events.event_blocks == block)]
        by_category = np.bincount(events.categories[numbers], weights=events.sizes[numbers], minlength=len(CATEGORIES))
        weights = sum(p.nbytes for p in module.blocks[block].parameters())
        assert by_category[CATEGORIES.index(Category.PARAMETER)] == weights
        assert by_category[CATEGORIES.index(Category.GRADIENT)] == 2 * weights  # of two steps
        assert by_category[CATEGORIES.index(Category.OPTIMIZER_STATE)] == 2 * weights
        assert by_category[CATEGORIES.index(Category.ACTIVATION)] >= 2 * 3 * 4 * 16 * 4
    outside = events.storages[allocated & (events.event_blocks == OUTSIDE)]
    assert events.sizes[outside].sum() > module.enter.weight.nbytes


def test_sites_name_module_and_operator(recorded):
    _, _, events = recorded
    assert any(name.startswith("blocks.3.up | aten.") for name in events.site_names)
    assert "batch" in events.site_names


def test_flops_of_a_step_and_of_one_block(recorded):
    _, recorder, _ = recorded
    total, of_block = recorder.flops()
    per_block = 2 * 4 * (16 * 32 * 2)
    assert of_block == {"forward": per_block, "backward": 2 * per_block}
    assert total["forward"] == 4 * per_block + 2 * 4 * 8 * 16


def test_a_resized_storage_counts_as_freed_and_allocated_anew():
    recorder = EventRecorder()
    with recorder:
        x = torch.empty(4)
        x.resize_(100)
        x.mul_(2)
    events = recorder.result()
    assert events.live_bytes().tolist() == [16, 0, 400]
    del x
    assert recorder.result().live_bytes()[-1] == 0


def test_a_tensor_joined_from_several_blocks_is_noticed():
    module = Four()
    recorder = EventRecorder(tuple(module.blocks))
    recorder.track_module(module)
    with recorder:
        torch.cat([p.flatten() for p in module.blocks[0].parameters()])
        assert recorder.gathered_bytes == 0
        joined = torch.cat([p.flatten() for p in module.blocks.parameters()])
    recorder.close()
    assert recorder.gathered_bytes == joined.nbytes


def test_work_is_counted_by_phase_without_views():
    recorder = EventRecorder()
    recorder.phase("forward")
    with recorder:
        a = torch.ones(8, 16)
        product = a.t() @ a
        product.relu_()
        product.view(-1)
    flops, moved = 2 * 16 * 16 * 8, 2 * a.nbytes + product.nbytes
    assert recorder.work()[0] == {
        "forward": (
            OperatorWork("elementwise", 0, a.nbytes, 1),
            OperatorWork("product float32", flops, moved, 1),
            OperatorWork("elementwise", 0, 2 * product.nbytes, 1),  # read and written
        )
    }
    assert recorder.flops()[0] == {"forward": flops}


@pytest.mark.parametrize(("columns", "kind"), [(64, "product bfloat16"), (50257, "product bfloat16 unaligned")])
def test_products_whose_rows_begin_anywhere_are_told_apart(columns: int, kind: str) -> None:
    recorder = EventRecorder()
    recorder.phase("forward")
    with recorder, FakeTensorMode():
        torch.ones(8, 16, dtype=torch.bfloat16) @ torch.ones(16, columns, dtype=torch.bfloat16)
    assert [row.kind for row in recorder.work()[0]["forward"]][-1] == kind


def test_looking_rows_up_moves_the_rows_and_not_the_table() -> None:
    recorder, table = EventRecorder(), torch.ones(1000, 8)
    recorder.phase("forward")
    with recorder:
        rows = torch.nn.functional.embedding(torch.arange(3), table)
    assert recorder.work()[0]["forward"][-1] == OperatorWork("indexing", 0, 2 * rows.nbytes, 1)


def test_cuda_allocates_the_mask_of_dropout_first():
    x, made = torch.ones(2, 1000), {}
    for as_cuda in (False, True):
        with EventRecorder(cuda=(9, 0) if as_cuda else None) as recorder:
            torch.native_dropout(x, 0.5, True)
        made[as_cuda] = recorder.result().sizes.tolist()
    assert made == {False: [8000, 2000], True: [2000, 8000]}


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 4), (torch.float16, 4), (torch.float64, 8)])
def test_cuda_keeps_statistics_of_16_bits_in_32(dtype, itemsize):
    with FakeTensorMode():
        x, weight = torch.empty(64, 32, dtype=dtype, requires_grad=True), torch.empty(32, dtype=dtype)
        with EventRecorder(cuda=(9, 0)) as recorder:
            kept = torch.native_layer_norm(x, [32], weight, weight, 1e-5)
            kept[0].sum().backward()
    assert recorder.result().sizes.tolist()[1:3] == [64 * itemsize] * 2
    assert kept[0].dtype is x.grad.dtype is dtype


class Counting(torch.optim.Optimizer):
    """Keeps what Adam keeps, for any of its options: a CPU refuses some."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight)}


@pytest.mark.parametrize(("options", "on_device"), [({}, 0), ({"fused": True}, 4), ({"capturable": True}, 4)])
def test_counts_of_steps_are_on_the_device_where_its_kernel_reads_them(options, on_device):
    optimizer = Counting([nn.Parameter(torch.ones(1000))], options)
    recorder = EventRecorder(cuda=(9, 0))
    recorder.track_optimizer(optimizer)
    with recorder:
        recorder.phase("step")
        optimizer.step()
    recorder.close()
    events = recorder.result()
    states = events.sizes[events.categories == CATEGORIES.index(Category.OPTIMIZER_STATE)]
    assert states.tolist() == [on_device, 4000]
