import bitsandbytes
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile import kernels
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.kernels import KernelMemory
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.truth.profile.modules import trace_step

from .modules import Stack, peak, trace_cpu, true_peak

aten = torch.ops.aten
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


def kernel_scratch_bytes(operator, args, result):
    """Scratch memory as it is learned."""
    found = KernelMemory().of(operator, args, {}, result)
    return 0 if found is None else max(found.peaks, default=0)


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


def noting(runs):
    """Runs operators as before, and notes each in a list."""
    original = kernels._observed
    return lambda call: runs.append(call) or original(call)


def forget_learned():
    kernels._known.clear()


@pytest.fixture
def forgotten():
    """Nothing is known yet."""
    forget_learned()
    yield
    forget_learned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [{}, {"samples": 4, "inputs": 64, "outputs": 64, "side": 16}, {"kernel": 1}, {"kernel": 7, "groups": 8}],
    ids=lambda case: " ".join(f"{name}={value}" for name, value in case.items()),
)
def test_the_scratch_memory_of_convolutions_is_learned_exactly(one_thread, dtype, case):
    for operator, args in convolutions(**case, dtype=dtype):
        assert kernel_scratch_bytes(operator, args, operator(*args)) == observed(operator, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", ["_MOST_FLOPS", "_MOST_BYTES"])
def test_large_operators_are_run_on_few_samples(one_thread, forgotten, monkeypatch, limit, dtype):
    """By far more samples than are run, and past the size from which another of two tensors is the larger."""
    for operator, args in convolutions(samples=24, inputs=32, outputs=64, dtype=dtype):
        result, expected = operator(*args), observed(operator, args)
        few = (args[0][:4], *args[1:]) if operator is FORWARD else (args[0][:4], args[1][:4], *args[2:])
        cost = {
            "_MOST_FLOPS": kernels._flops(operator, few, {}, operator(*few)),
            "_MOST_BYTES": sum(leaf.nbytes for leaf in tree_leaves(few) if isinstance(leaf, torch.Tensor)),
        }
        if limit == "_MOST_BYTES":
            cost[limit] += operator(*few)[0].nbytes if operator is FORWARD else args[1].nbytes
        runs = []
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_observed", noting(runs))
            patch.setattr(kernels, "_AT_ONCE_BYTES", 1)
            patch.setattr(kernels, limit, cost[limit])
            forget_learned()
            assert kernel_scratch_bytes(operator, args, result) == expected
            assert [call.args[0].shape[0] for call in runs] == [2, 3]


def test_an_operator_is_run_once(forgotten, monkeypatch):
    runs = []
    monkeypatch.setattr(kernels, "_observed", noting(runs))
    for _ in range(2):
        for operator, args in convolutions():
            kernel_scratch_bytes(operator, args, operator(*args))
    assert [call.func for call in runs] == [FORWARD, BACKWARD]
    for operator, args in convolutions(samples=3):
        kernel_scratch_bytes(operator, args, operator(*args))
    assert [call.func for call in runs] == [FORWARD, BACKWARD] * 2


def test_threads_random_state_and_autocast_stay_as_they_were(forgotten):
    operator, args = next(convolutions())
    result, threads, state = operator(*args), torch.get_num_threads(), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        exact = kernel_scratch_bytes(operator, args, result)
        assert torch.is_autocast_enabled("cpu")
    forget_learned()
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


@pytest.mark.nightly_cases("bf16-true", "bf16-mixed")
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


# --- other operators --------------------------------------------------------------------------------------------------


def taken(operator, *args, **kwargs):
    """Peak of what an operator takes, with its results, as learned and as the allocator reports it."""
    result = operator(*args, **kwargs)
    found = KernelMemory().of(operator, args, kwargs, result)
    learned = 0 if found is None else max(found.peaks, default=0)
    extra = 0 if found is None else sum(found.extra)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    kept = {leaf.untyped_storage()._cdata: leaf.nbytes for leaf in tensors}
    with allocation_events() as changes:
        again = operator(*args, **kwargs)
    del again
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return sum(kept.values()) + extra + learned, highest


ROWS, WIDTH = 48, 96
x = torch.rand(ROWS, WIDTH)
places = torch.zeros(ROWS, dtype=torch.int64)
image = torch.rand(2, 6, 12, 12)
one = torch.tensor(1.0)
CASES = {
    "cdist": (aten._cdist_forward.default, x, x, 2.0, None),
    "topk": (aten.topk.default, x, 5),
    "sort": (aten.sort.default, x),
    "cumprod": (aten.cumprod.default, x, 1),
    "index_put": (aten.index_put.default, x, [torch.zeros(9, dtype=torch.int64)], torch.rand(9, WIDTH), True),
    "embedding_backward": (aten.embedding_dense_backward.default, x, places, 70, -1, True),
    "upsample_channels_last": (
        aten.upsample_bilinear2d.vec, image.to(memory_format=torch.channels_last), None, True, [2.0, 2.0]
    ),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        x, x, [WIDTH], torch.rand(ROWS, 1), torch.rand(ROWS, 1), x[0], x[0], [True] * 3,
    ),
    "group_norm_backward": (
        aten.native_group_norm_backward.default,
        image, image, torch.rand(2, 3), torch.rand(2, 3), torch.rand(6), 2, 6, 144, 3, [True] * 3,
    ),
    "flash_attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default, *[torch.rand(2, 3, 70, 16)] * 3
    ),
    "mixed_types": (aten.add.Tensor, x, torch.ones(ROWS, WIDTH, dtype=torch.int64)),
    "copy_of_a_transposed": (aten.clone.default, torch.rand(80, 90).t()),
    "convolution_transposed": (
        FORWARD, torch.randn(2, 8, 10, 10), torch.randn(8, 16, 3, 3), torch.randn(16),
        [2, 2], [1, 1], [1, 1], True, [1, 1], 1,
    ),
    "mm_bf16": (aten.mm.default, x.bfloat16(), x.t().bfloat16()),
    "dropout": (aten.native_dropout.default, x, 0.5, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_any_operator_takes_is_learned_exactly(one_thread, name):
    operator, *args = CASES[name]
    learned, expected = taken(operator, *args)
    assert learned == pytest.approx(expected, abs=kernels._SCALAR_BYTES)


WHOLE = torch.ones(ROWS, WIDTH, dtype=torch.int64)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ((x, torch.tensor(3)), (x, WHOLE)),
        ((x[:3, :1].clone(), WHOLE[:3, :1].clone()), (x, WHOLE)),
        ((x[:3], WHOLE[:3, :1].clone()), (x, WHOLE[:, :1].clone())),
        ((WHOLE[0, :3].clone(), 1.5), (WHOLE[0], 1.5)),
        ((x[:3, :3].bool(), x[:3, :3].bfloat16()), (x.bool(), x.bfloat16())),
    ],
)
def test_few_converted_elements_tell_nothing_of_many(one_thread, forgotten, small, large):
    """A converted operand may be as small as what scalars take; larger ones of the same types were taken for free."""
    for args in (small, large):
        learned, expected = taken(aten.add.Tensor, *args)
        assert learned == pytest.approx(expected, abs=kernels._SCALAR_BYTES)


@pytest.mark.parametrize("name", ["topk", "layer_norm_backward", "sort", "cumprod", "mixed_types"])
@pytest.mark.parametrize("limit", ["_MOST_FLOPS", "_MOST_BYTES"])
def test_what_large_operators_take_is_extrapolated(one_thread, forgotten, monkeypatch, name, limit):
    """As if a twentieth of the rows were the most that can be run."""
    operator, *args = CASES[name]
    rows = 640
    args = [
        torch.ones(rows, *value.shape[1:], dtype=value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == ROWS
        else value
        for value in args
    ]
    monkeypatch.setattr(kernels, "_AT_ONCE_BYTES", 1)
    result = operator(*args)
    size_bytes = sum(leaf.nbytes for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))
    most = {"_MOST_BYTES": size_bytes, "_MOST_FLOPS": kernels._flops(operator, args, {}, result)}[limit]
    monkeypatch.setattr(kernels, limit, most / 8)
    runs = []
    monkeypatch.setattr(kernels, "_observed", noting(runs))
    learned, expected = taken(operator, *args)
    assert learned == pytest.approx(expected, rel=1e-3, abs=kernels._SCALAR_BYTES)
    assert max(call.num_bytes for call in runs) < size_bytes / 2


def test_large_operators_on_single_elements_are_not_run(forgotten, monkeypatch):
    runs = []
    monkeypatch.setattr(kernels, "_observed", noting(runs))
    large = torch.empty(2000, 1000)
    assert KernelMemory().of(aten.mul.Tensor, (large, large), {}, large) is None
    assert not runs


class Marked(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.loss = loss

    def forward(self, values):
        return self.loss((values * self.weight).sigmoid(), torch.rand_like(values))


class Scaled(pl.LightningModule):
    """One weight per column and a loss: nearly all memory is the loss's."""

    def __init__(self, loss):
        super().__init__()
        self.net = Marked(loss)

    def training_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trace_and_a_measurement_count_what_losses_take(one_thread):
    batch, loss = torch.rand(64, 256), nn.functional.huber_loss
    traced = profile_module(Scaled(loss), batch, emulation=Emulation("cpu"))
    measured = measure_step(Scaled(loss), batch)
    expected = true_peak(lambda: Scaled(loss), batch.clone, 2)
    assert peak(traced.events) == pytest.approx(expected, rel=1e-3)
    assert peak(measured.events) == pytest.approx(expected, rel=1e-3)
    assert traced.remarks == measured.remarks == ()
    assert peak(traced.events_at(100)) == pytest.approx(
        peak(trace_cpu(Scaled(loss), torch.rand(100, 256)).events), rel=1e-3
    )


# --- what is not known ------------------------------------------------------------------------------------------------


counted = []


@torch.library.custom_op("memfit_test::doubled", mutates_args=())
def doubled(values: torch.Tensor) -> torch.Tensor:
    counted.append(values)
    return values + values


@doubled.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


doubled.register_autograd(lambda context, gradient: gradient * 2)


def test_custom_operators_are_named_and_never_run(forgotten):
    counted.clear()
    traced = trace_cpu(Scaled(lambda values, _: doubled(values).mean()), torch.rand(4, 256))
    assert traced.remarks == ("scratch memory of `memfit_test::doubled` is not known",)
    assert not counted


def test_operators_that_cannot_be_run_are_named():
    memory = KernelMemory()
    operator, args = next(convolutions())
    bad = (*args[:3], "no stride", *args[4:])
    memory.of(operator, bad, {}, operator(*args))
    assert memory.remarks() == ["scratch memory of `aten::convolution` is not known"]
    for name in "abcd":
        memory.unknown[name] = None
    assert memory.remarks()[0].endswith("`a`, `b` and 2 more operators is not known")


def test_a_profiler_of_the_user_is_left_alone_and_named(forgotten):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        traced = trace_cpu(Scaled(nn.functional.mse_loss), torch.rand(4, 256))
    assert "profiler" in traced.remarks[0]
    assert profiler.key_averages()
    assert trace_cpu(Scaled(nn.functional.mse_loss), torch.rand(4, 256)).remarks == ()


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_what_a_trace_learned_is_known_to_the_next(forgotten, monkeypatch):
    module, batch = Scaled(nn.functional.mse_loss), torch.rand(4, 256)
    first = trace_cpu(module, batch)
    monkeypatch.setattr(kernels, "_observed", lambda call: pytest.fail(f"{call} was run again"))
    assert peak(trace_cpu(module, batch).events) == peak(first.events)


def test_under_other_settings_an_operator_is_run_anew(forgotten, monkeypatch):
    runs = []
    monkeypatch.setattr(kernels, "_observed", noting(runs))
    operator, args = next(convolutions())
    for setting in ("AVX2", "SSE41"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", setting)
        kernel_scratch_bytes(operator, args, operator(*args))
    assert len(runs) == 2


class OwnScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.shape = values.shape
        return values[:, :9] * 1

    @staticmethod
    def backward(ctx, gradient):
        places = torch.zeros(gradient.shape, dtype=torch.int64)
        return torch.zeros(ctx.shape).scatter_add(1, places, gradient)


class OwnLargest(Scaled):
    def training_step(self, batch, batch_idx):
        return OwnScatter.apply((batch * self.net.weight).sigmoid()).mean()


def test_formulas_of_users_write_as_they_say(one_thread):
    """Those of autograd write in place, as the memory zoo's `topk` shows."""
    batch = torch.rand(64, 256)
    traced = trace_cpu(OwnLargest(None), batch)
    assert peak(traced.events) == pytest.approx(true_peak(lambda: OwnLargest(None), batch.clone, 2), rel=1e-3)


class Turned(Scaled):
    """Batch norm of turned input lies in memory as its shape says, so that each of the layers behind it copies it."""

    def __init__(self):
        super().__init__(None)
        self.net = nn.ModuleList([nn.BatchNorm1d(64), *(nn.Linear(64, 64) for _ in range(3))])

    def training_step(self, batch, batch_idx):
        norm, *layers = self.net
        for _ in range(4):
            values = norm(batch.mT).mT
            batch = sum(layer(values).sin() for layer in layers)
        return batch.mean()


def test_results_lie_in_memory_as_real_ones_do(one_thread, forgotten):
    batch = torch.rand(16, 32, 64)
    measure_step(Turned(), batch)  # whose results lie as real ones do, so that it learns nothing of this
    forget_learned()
    traced = trace_cpu(Turned(), batch)
    assert peak(traced.events) == pytest.approx(true_peak(Turned, batch.clone, 2), rel=1e-3)
    assert peak(trace_cpu(Turned(), batch).events) == peak(traced.events)  # from what is known


class Recomputed(Scaled):
    def training_step(self, batch, batch_idx):
        values = batch * self.net.weight
        for _ in range(6):
            values = torch.utils.checkpoint.checkpoint(torch.sigmoid, values, use_reentrant=False)
        return values.mean()


class Slopes(Scaled):
    def __init__(self):
        super().__init__(None)
        self.net = nn.Linear(256, 256)

    def training_step(self, batch, batch_idx):
        values, slopes = torch.func.jvp(self.net, (batch,), (torch.ones_like(batch),))
        return values.mean() + slopes.square().mean()


def test_zeros_of_forward_mode_differentiation_take_no_memory(one_thread):
    batch = torch.rand(8, 256)
    traced = trace_cpu(Slopes(), batch)
    truth = true_peak(Slopes, batch.clone, 2)
    assert peak(traced.events) == pytest.approx(truth, rel=1e-3)
    assert traced.remarks == ()


def test_states_of_random_numbers_that_checkpoints_keep_are_counted(one_thread):
    """Five kilobytes each."""
    batch = torch.rand(8, 256)
    traced, measured = trace_cpu(Recomputed(None), batch), measure_step(Recomputed(None), batch)
    truth = true_peak(lambda: Recomputed(None), batch.clone, 2)
    assert peak(traced.events) == pytest.approx(truth, rel=1e-3)
    assert peak(measured.events) == pytest.approx(truth, rel=1e-3)
    assert torch.get_rng_state is torch.random.get_rng_state
