"""Samples that are run apart get the noise that they get together, whatever draws it."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_memfit.fitting.step import noise
from lightning_memfit.fitting.step.noise import RecordedNoise, SlicedNoise, without_recurrent_dropout

Step = Callable[[Tensor], Tensor]


def together_and_apart(
    step: Step, batch: Tensor, sizes: Sequence[int], own: torch.Generator | None = None
) -> tuple[Tensor, list[Tensor], list[SlicedNoise]]:
    """Run a step on all samples and on parts, all from the same state of the generators."""
    state = None if own is None else own.get_state()

    def run(noise: RecordedNoise, part: Tensor) -> Tensor:
        torch.manual_seed(3)
        if own is not None:
            own.set_state(state)
        with noise:
            return step(part)

    whole = RecordedNoise(sum(sizes))
    found = run(whole, batch)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    noises = [SlicedNoise(whole, end - size, size, sum(sizes)) for end, size in zip(ends, sizes, strict=True)]
    return found, [run(noise, part) for noise, part in zip(noises, batch.split(list(sizes)), strict=True)], noises


def assert_rows(step: Step, batch: Tensor, sizes: Sequence[int], own: torch.Generator | None = None) -> Tensor:
    """Check that the parts' results are exactly the rows of those of all samples, and return these."""
    found, parts, noises = together_and_apart(step, batch, sizes, own)
    torch.testing.assert_close(torch.cat(parts), found, rtol=0, atol=0)
    assert not any(noise.is_other for noise in noises)
    return found


DRAWS: dict[str, Step] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout without noise": lambda x: functional.dropout(x, 0.0),
    "dropout of everything": lambda x: functional.dropout(x, 1.0),
    "feature dropout": lambda x: functional.dropout1d(x, 0.4),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "in place": lambda x: functional.dropout(x.clone(), 0.4, inplace=True),
    "rrelu": lambda x: functional.rrelu(x - 0.5, training=True),
    "randn": lambda x: x + torch.randn(len(x), 4, 3, dtype=x.dtype),
    "rand": lambda x: x * torch.rand(len(x), 1, 1, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 100, (len(x), 1, 1)),
    "randint_like": lambda x: x + torch.randint_like(x, 100),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "normal of means": lambda x: torch.normal(x, 1.0),
    "uniform_": lambda x: x + torch.empty(len(x), 4, 3, dtype=x.dtype).uniform_(-1, 1),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x[:, 0].softmax(-1), 2).to(x.dtype),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "stochastic depth": lambda x: x * torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.5),
    "several": lambda x: functional.dropout(x + torch.randn_like(x), 0.5) * torch.rand(len(x), 1, 1),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (2, 3, 1)])
def test_parts_get_their_rows(name: str, sizes: tuple[int, ...]) -> None:
    assert_rows(DRAWS[name], torch.arange(72, dtype=torch.float64).reshape(6, 4, 3).div(72), sizes)


@pytest.mark.parametrize("name", ["dropout", "randn_like", "normal_", "several"])
def test_noise_does_not_repeat_itself(name: str) -> None:
    found = assert_rows(DRAWS[name], torch.ones(6, 4, 3, dtype=torch.float64), (2, 4))
    assert not torch.equal(found[:2], found[2:4])
    assert not torch.equal(found[2:4], found[4:])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.floats(0.0, 1.0), st.booleans())
def test_any_sizes_and_shapes(sizes: list[int], width: int, probability: float, is_time_major: bool) -> None:
    total = sum(sizes)

    def step(x: Tensor) -> Tensor:
        values = x.t().contiguous() if is_time_major else x
        values = functional.dropout(values + torch.randn_like(values), probability) * torch.rand(values.shape)
        return values.t() if is_time_major else values

    # A width that could be taken for the samples is no trouble either: the samples' dimension differs.
    assert_rows(step, torch.arange(total * width, dtype=torch.float64).reshape(total, width), sizes)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(2, 1, 0).contiguous(),
    ],
)
@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda x: functional.dropout(x, 0.5)])
def test_transposed_layouts(layout: Step, draw: Step) -> None:
    """Numbers are drawn in the order of memory, which `rand_like` takes from its tensor."""
    batch = torch.arange(1, 73, dtype=torch.float64).reshape(6, 4, 3)
    dim = list(layout(batch).shape).index(6)
    assert_rows(lambda x: draw(layout(x)).movedim(dim, 0), batch, (2, 4))


def test_images_with_channels_last() -> None:
    batch = torch.ones(4, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_rows(lambda x: functional.dropout(x, 0.5) * torch.rand_like(x), batch, (1, 3))


@pytest.mark.parametrize("draw", ["dropout", "rand_like", "bernoulli of probabilities", "normal of means"])
def test_several_entries_per_sample(draw: str) -> None:
    """Samples and tokens in one dimension, (B*T, C): every sample has T rows."""
    batch = torch.arange(1, 73, dtype=torch.float64).reshape(6, 4, 3).div(72)
    step = DRAWS[draw]
    assert_rows(lambda x: step(x.reshape(-1, 3)).reshape(-1, 4, 3), batch, (1, 3, 2))
    assert_rows(lambda x: step(x.transpose(1, 2).reshape(-1, 4)).reshape(-1, 3, 4), batch, (4, 2))


def test_multinomial_over_the_tokens_of_all_samples() -> None:
    batch = torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_rows(lambda x: torch.multinomial(x.reshape(-1, 3), 1).reshape(-1, 4), batch, (1, 5))


def test_draws_that_do_not_depend_on_the_batch_are_the_same_everywhere() -> None:
    def step(x: Tensor) -> Tensor:
        shared = torch.randn(4, 3, dtype=x.dtype)  # position noise, random projections
        order = torch.randperm(3)
        return x[..., order] + shared * torch.rand(()) + torch.randint(9, (1,))

    assert_rows(step, torch.arange(72, dtype=torch.float64).reshape(6, 4, 3), (2, 4))


def test_draws_on_a_device_without_number_are_those_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.rand(n, device="cuda")` on a rank whose current device is the second."""
    generators = (torch.Generator(), torch.Generator())
    module = SimpleNamespace(default_generators=generators, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    drawn_from = [noise._generator((3,), {"device": torch.device(name)}) for name in ("cuda", "cuda:0", "cuda:1")]
    assert [generators.index(found) for found in drawn_from] == [1, 0, 1]


def test_draws_after_one_of_another_size_go_on_alike() -> None:
    """Generators go through the same states, though a part asks for fewer numbers."""
    states = []

    def step(x: Tensor) -> Tensor:
        x = x + torch.randn_like(x)
        torch.randperm(len(x))
        states.append(torch.get_rng_state())
        return x + torch.rand(3, dtype=x.dtype)

    assert_rows(step, torch.zeros(5, 3, dtype=torch.float64), (2, 3))
    assert all(torch.equal(state, states[0]) for state in states)


def test_own_generator() -> None:
    own = torch.Generator().manual_seed(5)

    def step(x: Tensor) -> Tensor:
        x = x + torch.randn(x.shape, generator=own, dtype=x.dtype)
        return x * torch.empty_like(x).bernoulli_(0.5, generator=own) + torch.rand_like(x)

    assert_rows(step, torch.ones(6, 3, dtype=torch.float64), (4, 2), own)


def test_attention_dropout() -> None:
    batch = torch.rand(4, 2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, parts, noises = together_and_apart(
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3), batch, (1, 3)
    )
    torch.testing.assert_close(torch.cat(parts), found, rtol=1e-12, atol=1e-14)
    assert not any(noise.is_other for noise in noises)


def test_a_transformer_layer_and_its_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
    gradients = []

    def step(x: Tensor) -> Tensor:
        layer.zero_grad()
        loss = layer(x).square().sum((1, 2))
        loss.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
        return loss.detach()

    found, parts, _ = together_and_apart(step, torch.rand(4, 5, 8, dtype=torch.float64), (1, 3))
    torch.testing.assert_close(torch.cat(parts), found, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1] + gradients[2], gradients[0], rtol=1e-10, atol=1e-12)


@pytest.fixture
def seeded_attention() -> Iterator[Callable[[Tensor, float], tuple[Tensor, Tensor]]]:
    """An operator that keeps to what CUDA's attention does: its backward makes the mask again from forward's seed.

    Forward leaves the seed unset where it drops nothing. Backward draws nothing, so that it isn't tagged as random.
    """
    library = torch.library.Library("test_noise", "DEF")
    library.define(
        "attention(Tensor value, float dropout_p) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,)
    )
    library.define("attention_backward(Tensor gradient, Tensor seed, float dropout_p) -> Tensor")

    def mask(like: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        return torch.rand(like.shape, generator=generator).ge(dropout_p).to(like.dtype) / (1 - dropout_p)

    def forward(value: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        if not dropout_p:
            return value.clone(), torch.tensor(len(value))  # in place of whatever lay in memory
        seed = torch.randint(1 << 30, ())
        return value * mask(value, seed, dropout_p), seed

    def backward(gradient: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
        return gradient * mask(gradient, seed, dropout_p) if dropout_p else gradient.clone()

    def setup(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.dropout_p = inputs[1]
        ctx.save_for_backward(output[1])

    def differentiate(context: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return operators.attention_backward(gradient, *context.saved_tensors, context.dropout_p), None

    operators = torch.ops.test_noise
    library.impl("attention", forward, "CPU")
    library.impl("attention_backward", backward, "CPU")
    torch.library.register_autograd("test_noise::attention", differentiate, setup_context=setup, lib=library)
    yield operators.attention
    library._destroy()


def _gradients_add_up(attention: Step, batch: Tensor, rtol: float) -> None:
    """Check that gradients of parts are the rows of those of all samples."""
    gradients = []

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = attention(x).square().flatten(1).sum(1)
        loss.sum().backward()
        gradients.append(x.grad)
        return loss.detach()

    found, parts, _ = together_and_apart(step, batch, (1, 3))
    torch.testing.assert_close(torch.cat(parts), found, rtol=rtol, atol=rtol)
    torch.testing.assert_close(torch.cat(gradients[1:]), gradients[0], rtol=rtol, atol=rtol)


def test_backward_of_fused_attention_drops_no_more_than_forward(
    seeded_attention: Callable[[Tensor, float], tuple[Tensor, Tensor]],
) -> None:
    batch = torch.rand(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _gradients_add_up(lambda x: seeded_attention(x, 0.3)[0], batch, 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=lambda b: b.name)
def test_fused_attention_on_a_card(backend: SDPBackend) -> None:
    batch = torch.rand(4, 2, 16, 32, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()

    def attention(x: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5).float()

    _gradients_add_up(attention, batch, 2e-2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_blocks_draw_what_they_drew(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    def gradient(recompute: bool) -> list[Tensor]:
        found = []

        def step(x: Tensor) -> Tensor:
            layer.zero_grad()
            x = x.clone().requires_grad_()
            out = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
            loss = (out * torch.rand_like(out)).sum(1)
            loss.sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
            return loss.detach()

        batch = torch.arange(18, dtype=torch.float64).reshape(6, 3).div(18)
        assert_rows(step, batch, (2, 4))
        return found

    plain, recomputed = gradient(recompute=False), gradient(recompute=True)
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(plain[1] + plain[2], plain[0], rtol=1e-12, atol=1e-12)


def test_mixing_of_samples_shows() -> None:
    """Mixup pairs samples by a permutation. One that is drawn may keep all samples of a part; here none does."""
    batch = torch.arange(6, dtype=torch.float64)[:, None]
    found, parts, _ = together_and_apart(lambda x: x + 10 * x[torch.randperm(len(x))], batch, (3, 3))
    assert found.flatten().tolist() == [50, 41, 32, 23, 14, 5]
    assert torch.cat(parts).flatten().tolist() == [20, 11, 2, 53, 44, 35]


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_permutations_of_features_mix_no_samples(size: int) -> None:
    """Not even as many features as there are samples, in all or in a part."""
    batch = torch.arange(6 * size, dtype=torch.float64).reshape(6, size)
    own = torch.Generator()
    assert_rows(lambda x: x[:, torch.randperm(size)] + torch.rand_like(x), batch, (2, 4))
    assert_rows(lambda x: x[:, torch.randperm(size, generator=own)] + torch.rand_like(x), batch, (2, 4), own)


def test_a_permutation_of_the_tokens_of_all_samples_shows() -> None:
    batch = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    found, parts, noises = together_and_apart(lambda x: x.flatten()[torch.randperm(2 * len(x))], batch, (1, 2))
    assert found.tolist() == [5, 4, 3, 2, 1, 0]
    assert torch.cat(parts).tolist() == [1, 0, 5, 4, 3, 2]
    assert not any(noise.is_other for noise in noises)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_permutations_of_the_samples_keep_their_dtype(sizes: tuple[int, int]) -> None:
    _, parts, _ = together_and_apart(lambda x: torch.randperm(len(x), dtype=torch.int32), torch.zeros(4), sizes)
    assert [part.dtype for part in parts] == [torch.int32] * 2


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.rand(int(x.sum())).sum() * x,  # as many as a value of the samples says
        lambda x: torch.rand_like(x) if len(x) > 3 else torch.randn_like(x),
        lambda x: torch.rand(len(x) // 2 + 1)[:1] * x,
        lambda x: x * torch.randperm(int(x.sum()))[0],
    ],
)
def test_noise_that_cannot_be_followed_is_told(step: Step) -> None:
    _, _, noises = together_and_apart(step, torch.arange(1.0, 7.0), (1, 5))
    assert any(noise.is_other for noise in noises)


def test_recurrent_dropout_is_off_for_a_while() -> None:
    layers = nn.ModuleList([nn.LSTM(3, 3, 2, dropout=0.5), nn.GRU(3, 3), nn.Dropout(0.5)])
    with without_recurrent_dropout(layers):
        assert [layer.dropout for layer in layers[:2]] == [0.0, 0.0]
        assert layers[2].p == 0.5
    assert [layer.dropout for layer in layers[:2]] == [0.5, 0.0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_apart(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, 2, dropout=0.5, batch_first=True).double()
    with without_recurrent_dropout(layer):
        found, parts, noises = together_and_apart(lambda x: layer(x)[0], torch.rand(4, 5, 3).double(), (1, 3))
    torch.testing.assert_close(torch.cat(parts), found, rtol=1e-12, atol=1e-14)
    assert not any(noise.is_other for noise in noises)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float64, 64), (torch.float32, 32), (torch.bfloat16, 16)])
def test_least_exact_numbers(dtype: torch.dtype, bits: int) -> None:
    noise = RecordedNoise(4)
    assert noise.least_bits == 64
    with noise:
        torch.ones(4, dtype=torch.float64).to(dtype) * 2
    assert noise.least_bits == bits
