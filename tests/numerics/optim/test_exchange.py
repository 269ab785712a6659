import copy
import io
from importlib.util import find_spec

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.optimizers import optimizer_classes

FAMILIES = optimizer_classes()
INSTALLED = [name for name in FAMILIES if find_spec(FAMILIES[name].package)]
LION = {"betas": (0.9, 0.99)}


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(16))]


def adamw(**kwargs):
    return torch.optim.AdamW(parameters(), lr=3e-3, **kwargs)


@pytest.mark.parametrize("name", FAMILIES)
def test_meanings_are_the_arguments_of_the_class(name):
    family = FAMILIES[name]
    if name not in INSTALLED:
        pytest.skip(f"{family.package} is not installed")
    arguments = family.load().__init__.__code__
    named = set(arguments.co_varnames[: arguments.co_argcount + arguments.co_kwonlyargcount]) - {"self", "params", "lr"}
    assert set(family.meanings) | set(family.settings) | set(family.fixed) <= named
    hidden = {"capturable", "differentiable", "foreach", "fused", "optim_bits", "args", "min_8bit_size", "is_paged"}
    hidden |= {"decoupled_weight_decay"}  # of torch.Adam, which then is AdamW
    assert named - hidden <= set(family.meanings) | set(family.settings) | set(family.fixed)


@pytest.mark.parametrize(
    ("name", "options", "drop", "cls"),
    [
        ("torch.AdamW", {"fused": True}, [], torch.optim.AdamW),
        ("torch.Adafactor", {"eps": [None, 1e-3]}, ["betas"], torch.optim.Adafactor),
        ("bitsandbytes.Lion", LION, [], bnb.optim.Lion),
    ],
)
def test_groups_are_kept_and_it_steps(name, options, drop, cls):
    first, second = parameters()
    original = torch.optim.AdamW(
        [{"params": [first], "weight_decay": 0.3, "name": "decayed"}, {"params": [second], "lr": 1e-2}],
        lr=3e-3,
        betas=(0.8, 0.9),
        weight_decay=0.0,
    )
    replaced = exchange(original, name, options, drop)
    assert isinstance(replaced, cls)
    a, b = replaced.param_groups
    assert (a["lr"], a["weight_decay"], a["name"], a["params"]) == (3e-3, 0.3, "decayed", [first])
    assert (b["lr"], b["weight_decay"], b["params"]) == (1e-2, 0.0, [second])
    for key, value in options.items():
        assert a[key] == b[key] == (tuple(value) if isinstance(value, list) else value)
    before = [first.detach().clone(), second.detach().clone()]
    for p in (first, second):
        p.grad = torch.ones_like(p)
    replaced.step()
    assert not torch.equal(first, before[0])
    assert not torch.equal(second, before[1])


def test_loaded_states_of_another_memory_format_keep_their_elements():
    results, saved = [], None
    for memory_format in (torch.channels_last, torch.channels_last, torch.contiguous_format):
        weight = nn.Parameter(torch.ones(8, 4, 3, 3).to(memory_format=memory_format))
        optimizer = exchange(torch.optim.AdamW([weight], lr=1e-2), "torch.AdamW", {"fused": True})
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(int(saved is None)))
        weight.grad = gradient.to(memory_format=memory_format)
        optimizer.step()
        saved = saved or optimizer.state_dict()
        results.append(weight.detach())
    torch.testing.assert_close(results[2], results[1])


def test_views_with_gaps_are_no_parameters_of_fused_kernels():
    whole = torch.randn(4, 8)
    optimizer = torch.optim.AdamW([nn.Parameter(whole[:, ::2])])
    with pytest.raises(ValueError, match=r"group 0 holds a view with gaps.*view\.clone"):
        exchange(optimizer, "torch.AdamW", {"fused": True})
    exchange(optimizer, "torch.AdamW")
    for whole_or_dense in (whole, whole.t(), whole[1:], whole[:1, ::2][:, :1], torch.ones(()), torch.ones(2, 0)):
        exchange(torch.optim.AdamW([nn.Parameter(whole_or_dense)]), "torch.AdamW", {"fused": True})


@pytest.mark.parametrize(
    ("make", "name", "options", "drop", "message"),
    [
        (adamw, "bitsandbytes.Lion", {}, [], r"betas=.* Adam's moments now, but Lion's.*options\.betas"),
        (adamw, "torch.Adafactor", {}, [], r"eps=.*options\.eps"),
        (lambda: adamw(betas=(0.9, 0.95)), "torch.Adafactor", {"eps": (None, 1e-3)}, [], "`betas.*List it in `drop`"),
        (lambda: adamw(amsgrad=True), "bitsandbytes.Lion", LION, [], "amsgrad=True"),
        (lambda: adamw(maximize=True), "bitsandbytes.Lion", LION, [], "maximize=True"),
        (lambda: adamw(capturable=True), "bitsandbytes.Lion", LION, [], "capturable=True"),
        (lambda: torch.optim.Adam(parameters(), weight_decay=0.1), "torch.AdamW", {}, [], "L2 penalty now"),
        (lambda: torch.optim.SGD(parameters(), lr=1.0, momentum=0.9), "torch.AdamW", {}, [], "momentum=0.9"),
        (adamw, "torch.SGD", {"momentun": 0.9, "weight_decay": 0.0}, [], r"options\.momentun.*momentum"),
        (adamw, "torch.Lamb", {}, [], r"torch\.Lamb.*Choose from"),
        (lambda: bnb.optim.AdamW8bit(parameters()), "torch.AdamW", {}, [], "AdamW8bit"),
    ],
)
def test_what_cannot_carry_over_is_refused(make, name, options, drop, message):
    with pytest.raises(ValueError, match=message):
        exchange(make(), name, options, drop)


def test_no_decay_is_none_of_either_kind():
    assert exchange(torch.optim.Adam(parameters()), "torch.AdamW").param_groups[0]["weight_decay"] == 0.0


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # its cache mixes kinds of optimizers up
    original = adamw(weight_decay=0.1, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.ExponentialLR(original, 0.5)
    replaced = exchange(original, "torchao.AdamW4bit", {"block_size": 128})
    schedule.optimizer = replaced
    group = replaced.param_groups[0]
    assert replaced.block_size == 128
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.1)
    before = [p.detach().clone() for p in group["params"]]
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    replaced.step()
    for p, old in zip(group["params"], before, strict=True):
        torch.testing.assert_close(p, old * (1 - 3e-4) - 3e-3, atol=2e-4, rtol=0)
    schedule.step()
    assert float(group["lr"]) == pytest.approx(1.5e-3)
    buffer = io.BytesIO()
    torch.save(replaced.state_dict(), buffer)  # without pickles of torchao's classes
    buffer.seek(0)
    resumed = exchange(adamw(), "torchao.AdamW4bit", {"block_size": 128})
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(group["params"], resumed.param_groups[0]["params"], strict=True):
        for key, value in replaced.state[p].items():
            found = resumed.state[q][key]
            assert type(found) is type(value)
            wide = [one.dequantize() if hasattr(value, "codes") else one for one in (found, value)]
            assert torch.equal(*wide), key
