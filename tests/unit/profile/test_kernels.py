import bitsandbytes
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from lightning_memfit.profile.kernels import kernel_scratch_bytes
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

from .modules import Stack, peak, trace_cpu


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


def test_pointwise_convolutions_in_fp32_and_other_operators_take_none():
    x = torch.empty(2, 32, 4, 4)
    operator = torch.ops.aten.convolution.default
    assert kernel_scratch_bytes(operator, (x, torch.empty(64, 32, 1, 1)), torch.empty(2, 64, 4, 4)) == 0
    assert kernel_scratch_bytes(torch.ops.aten.mm.default, (x, x), x) == 0
