import bitsandbytes
import lightning.pytorch as pl
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from lightning_memfit.profile import kernels
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.kernels import estimated_scratch_bytes, kernel_scratch_bytes
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, trace_step
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

from .modules import Stack, peak, trace_cpu

FORWARD = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def test_the_scratch_memory_of_8_bit_steps_is_seen():
    """The kernel dequantizes in fp32, one parameter at a time."""
    module, batch = Stack(num_blocks=1, width=128), torch.randn(1, 128)
    trace = trace_cpu(module, batch, StepOptions(), callbacks=(Optimizer8bit(),))
    events = trace.events
    last_step = max(at for at, name in events.phases if name == "step")
    live = events.live_bytes()
    largest = 128 * 256 * 4
    assert trace.optimizer == bitsandbytes.optim.AdamW8bit.__name__
    assert live[last_step:].max() - live[-1] >= 2 * largest
    assert peak(events) == live.max()


def allocated_peak(function):
    """Peak over what was alive before, from the profiler's allocation events."""
    from torch._C._profiler import _EventType

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        events.append(event)
        stack.extend(event.children)
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            live += event.extra_fields.alloc_size
            highest = max(highest, live)
    return highest, result


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.001), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "samples", "side", "kernel"),
    [(32, 64, 2, 8, 3), (64, 64, 4, 16, 3), (64, 128, 8, 32, 3), (256, 256, 2, 8, 3), (32, 32, 4, 64, 5)],
)
def test_the_scratch_memory_of_convolutions_is_what_the_profiler_sees(
    one_thread, dtype, tolerance, inputs, outputs, samples, side, kernel
):
    x = torch.randn(samples, inputs, side, side, dtype=dtype)
    weight = torch.randn(outputs, inputs, kernel, kernel, dtype=dtype)
    geometry = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    gradient = torch.randn(samples, outputs, side, side, dtype=dtype)
    for operator, args in (
        (forward, (x, weight, None, *geometry)),
        (backward, (gradient, x, weight, None, *geometry, [True, True, False])),
    ):
        operator(*args)
        highest, result = allocated_peak(lambda operator=operator, args=args: operator(*args))
        kept = sum(tensor.nbytes for tensor in tree_leaves(result) if tensor is not None)
        assert highest == pytest.approx(kept + kernel_scratch_bytes(operator, args, result), rel=tolerance)


def convolutions(samples=2, inputs=8, outputs=16, side=8, kernel=3, dtype=torch.float32, **geometry):
    """Operator and arguments of forward and backward."""
    stride, groups, layout = (geometry.get(key, 1) for key in ("stride", "groups", "layout"))
    layout = torch.contiguous_format if layout == 1 else layout
    x = torch.randn(samples, inputs, side, side, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype)
    rest = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    output = FORWARD(x, weight, None, *rest)
    yield FORWARD, (x, weight, None, *rest)
    yield BACKWARD, (torch.randn_like(output), x, weight, None, *rest, [True, True, False])


def observed(operator, args):
    """Scratch memory as torch's profiler sees it."""
    highest, result = allocated_peak(lambda: operator(*args))
    return highest - sum(tensor.nbytes for tensor in tree_leaves(result) if tensor is not None)


@pytest.fixture
def forgotten(monkeypatch):
    """Nothing is known yet."""
    monkeypatch.setattr(kernels, "_known", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [{"kernel": 1}, {"stride": 2}, {"groups": 8}, {"layout": torch.channels_last}, {"inputs": 3, "samples": 1}],
    ids=lambda case: " ".join(case),
)
def test_the_scratch_memory_of_other_convolutions_is_learned_exactly(one_thread, dtype, case):
    for operator, args in convolutions(**case, dtype=dtype):
        assert kernel_scratch_bytes(operator, args, operator(*args)) == observed(operator, args)


def test_transposed_and_one_dimensional_convolutions_are_learned_exactly(one_thread):
    x, plane = torch.randn(2, 8, 40), torch.randn(2, 8, 10, 10)
    for args in (
        (x, torch.randn(16, 8, 3), None, [1], [1], [1], False, [0], 1),
        (plane, torch.randn(8, 16, 3, 3), torch.randn(16), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ):
        assert kernel_scratch_bytes(FORWARD, args, FORWARD(*args)) == observed(FORWARD, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", ["_MOST_FLOPS", "_MOST_BYTES"])
def test_large_operators_are_run_on_few_samples(one_thread, forgotten, monkeypatch, limit, dtype):
    """By far more samples than are run, and past the size from which another of two tensors is the larger."""
    for operator, args in convolutions(samples=24, inputs=32, outputs=64, dtype=dtype):
        result, expected = operator(*args), observed(operator, args)
        few = (args[0][:4], *args[1:]) if operator is FORWARD else (args[0][:4], args[1][:4], *args[2:])
        cost = {
            "_MOST_FLOPS": kernels.flop_registry[operator._overloadpacket](*few, out_val=operator(*few)),
            "_MOST_BYTES": sum(leaf.nbytes for leaf in tree_leaves(few) if isinstance(leaf, torch.Tensor)),
        }
        known = len(kernels._known)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, limit, cost[limit])
            assert kernel_scratch_bytes(operator, args, result) == expected
            assert len(kernels._known) == known + 2
            patch.setattr(kernels, limit, 1)
            assert kernel_scratch_bytes(operator, args, result) == estimated_scratch_bytes(operator, args, result)


def test_an_operator_is_run_once(forgotten, monkeypatch):
    runs = []
    original = kernels._observed
    monkeypatch.setattr(kernels, "_observed", lambda *args: runs.append(args[0]) or original(*args))
    for _ in range(2):
        for operator, args in convolutions():
            kernel_scratch_bytes(operator, args, operator(*args))
    assert runs == [FORWARD, BACKWARD]
    for operator, args in convolutions(samples=3):
        kernel_scratch_bytes(operator, args, operator(*args))
    assert runs == [FORWARD, BACKWARD] * 2


def test_what_cannot_be_observed_is_estimated(forgotten):
    operator, args = next(convolutions())
    result = operator(*args)
    estimate = estimated_scratch_bytes(operator, args, result)
    with profile(activities=[ProfilerActivity.CPU]):
        assert kernel_scratch_bytes(operator, args, result) == estimate
    elsewhere = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
    assert kernel_scratch_bytes(operator, elsewhere, result) == estimate
    assert kernel_scratch_bytes(operator, (*args[:3], "no stride", *args[4:]), result) == estimate
    assert all(run is None for run in kernels._known.values())


def test_threads_random_state_and_autocast_stay_as_they_were(forgotten):
    operator, args = next(convolutions())
    result, threads, state = operator(*args), torch.get_num_threads(), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        exact = kernel_scratch_bytes(operator, args, result)
        assert torch.is_autocast_enabled("cpu")
    kernels._known.clear()
    assert kernel_scratch_bytes(operator, args, result) == exact
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


class Convolutional(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, stride=2)

    def training_step(self, batch, batch_idx):
        return self.leave(self.enter(batch).relu()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_other_sizes_are_predicted_with_their_scratch_memory(precision):
    options = StepOptions(precision)
    profiled = profile_module(Convolutional(), torch.randn(2, 3, 32, 32), options, Emulation("cpu"))
    for samples in (2, 3, 12):
        traced = trace_cpu(Convolutional(), torch.randn(samples, 3, 32, 32), options).events
        assert "kernel scratch" in " ".join(traced.site_names)
        assert peak(profiled.events_at(samples)) == pytest.approx(peak(traced), rel=0.001)


def test_a_trace_for_cuda_runs_nothing(forgotten):
    trace_step(Convolutional(), torch.randn(2, 3, 32, 32), StepOptions(), Emulation("cuda"))
    assert not kernels._known


def test_other_operators_take_none_and_pointwise_ones_in_fp32_by_formula():
    x = torch.empty(2, 32, 4, 4)
    assert estimated_scratch_bytes(FORWARD, (x, torch.empty(64, 32, 1, 1)), torch.empty(2, 64, 4, 4)) == 0
    assert kernel_scratch_bytes(torch.ops.aten.mm.default, (x, x), x) == 0
