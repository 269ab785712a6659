"""Blocks whose forward changes state, draws random numbers or writes to its inputs."""

import array
import dataclasses
import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

WIDTH = 6
CALLS = [0]
TOTAL = 0


class Block(nn.Module):
    """A product, and whatever a subclass does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self) -> None:
        pass

    def forward(self, x):
        return x + self.change(self.inner(x).sin())

    def change(self, y):
        return y


class Counter(Block):
    def build(self):
        self.count = 0
        self.seen = []
        self.stats = {"calls": 0, "norms": []}

    def change(self, y):
        self.count += 1
        self.seen.append(self.count)
        self.stats["calls"] += 1
        self.stats["norms"].append(float(y.detach().norm()))
        return y + 0.1 * self.count * self.stats["calls"] * len(self.seen)


class GlobalCounter(Block):
    kept = 0

    def change(self, y):
        global TOTAL
        CALLS[0] += 1
        TOTAL += 1
        type(self).kept += 1
        return y + 0.01 * CALLS[0] * TOTAL * GlobalCounter.kept


class RunningBuffer(Block):
    def build(self):
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("num", torch.zeros((), dtype=torch.long))

    def change(self, y):
        with torch.no_grad():
            self.running.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.num += 1
        return y - self.running.clone() * self.num


class LargeBuffer(Block):
    """A memory bank larger than what is copied in every call; it is rolled by `.data`."""

    def build(self):
        self.register_buffer("bank", torch.randn(1 << 12, WIDTH))

    def change(self, y):
        out = y + (y.detach() @ self.bank.T).softmax(-1) @ self.bank.clone()
        self.bank.data.copy_(self.bank.roll(1, 0) + y.detach().mean())
        return out


class ReassignedBuffer(Block):
    def build(self):
        self.register_buffer("bank", torch.randn(1 << 12, WIDTH))
        self.cached = None

    def change(self, y):
        before = 0.0 if self.cached is None else self.cached
        self.bank = torch.roll(self.bank, 1, 0) + y.detach().mean()
        self.cached = y.detach() * 2
        return y * self.bank.mean() + before


class Recurrent(Block):
    """Its state carries the graph of the step before until it is detached."""

    def build(self):
        self.hidden = None

    def change(self, y):
        if self.hidden is not None:
            y = y + self.hidden.detach()
        self.hidden = y.tanh()
        return self.hidden


class ClampedWeights(Block):
    def forward(self, x):
        self.inner.weight.data.clamp_(-0.2, 0.2).mul_(0.9)
        return super().forward(x)


class Spectral(Block):
    def build(self):
        self.inner = parametrizations.spectral_norm(self.inner)


class Norms(Block):
    def build(self):
        self.batch = nn.BatchNorm1d(WIDTH)
        self.average = nn.BatchNorm1d(WIDTH, momentum=None)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.drop = nn.Dropout(0.3)

    def change(self, y):
        y = self.average(self.batch(y))
        return self.drop(self.instance(y.view(-1, 2, WIDTH // 2)).reshape(y.shape))


class NumpyNormals(Block):
    """NumPy draws these in pairs, of which it keeps the second: the bytes of its generator stay as they are then."""

    def change(self, y):
        return y * np.random.standard_normal()  # noqa: NPY002


class OwnGenerators(Block):
    def build(self):
        self.torch_generator = torch.Generator().manual_seed(1)
        self.others = {"numpy": np.random.default_rng(2), "python": random.Random(3)}

    def change(self, y):
        noise = torch.rand(y.shape, generator=self.torch_generator)
        return y * noise * self.others["numpy"].random() * self.others["python"].random()


class InputInPlace(Block):
    def forward(self, x):
        x = x.mul_(2) if self.training else x
        return self.inner(x).sin()


class IntermediateInPlace(Block):
    def forward(self, x):
        return self.body(x * 1.5)

    def body(self, x):
        nn.functional.relu(x, inplace=True)
        return x + self.inner(x).sin()


class EarlyExit(Block):
    def forward(self, x):
        return x if self.training and torch.rand(()) < 0.5 else super().forward(x)


class Experts(Block):
    def build(self):
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)
        self.aux = None

    def change(self, y):
        scores = self.gate(y) + torch.randn(len(y), 3)
        self.aux = scores.softmax(-1).mean()
        chosen = scores.argmax(-1)
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                out[rows] = expert(y[rows])
        return out * scores.max(-1, keepdim=True).values


class NumpyArray(Block):
    def build(self):
        self.table = np.ones(WIDTH, dtype=np.float32)

    def change(self, y):
        self.table += 1
        return y + 0.1 * torch.from_numpy(self.table.copy())


class InnerGradient(Block):
    """A penalty on a gradient that is taken inside forward."""

    def forward(self, x):
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            energy = self.inner(point).sin().sum()
            (slope,) = torch.autograd.grad(energy, point, create_graph=True)
        return x + slope


class Net(nn.Module):
    """Blocks one after the other, the last of which is called twice."""

    def __init__(self, kind, twice=False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(kind() for _ in range(3)))
        self.twice = twice

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.blocks[-1](x) if self.twice else x


def reset(keep_weights=False):
    """Seed all generators, and start global counters anew; with other seeds once weights and data are made."""
    global TOTAL
    CALLS[0], TOTAL, GlobalCounter.kept = 0, 0, 0
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(int(keep_weights))


def plainly(value):
    """Something that compares: state of any kind."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): plainly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plainly(item) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def state_of(net):
    own = {name: plainly({k: v for k, v in vars(m).items() if k[0] != "_"}) for name, m in net.named_modules()}
    for attributes in own.values():
        attributes.pop("forward", None)
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
    return {"tensors": plainly(net.state_dict()), "own": own, "global": (CALLS[0], TOTAL, GlobalCounter.kept),
            "drawn": drawn}  # fmt: skip


class HooksInput(Block):
    """Doubles its input's gradient, in every call anew."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return super().forward(x)


class HooksWeight(Block):
    """Doubles a weight's gradient, in every call once more."""

    def forward(self, x):
        self.inner.weight.register_hook(lambda gradient: 2 * gradient)
        return super().forward(x)


class HoldsSystemRandom(Block):
    """Holds a source that has no state to put back, and draws nothing that matters."""

    def build(self):
        self.source = random.SystemRandom()

    def forward(self, x):
        self.source.random()
        return super().forward(x)


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0


def add_slot(state):
    state.calls += 1
    return state.calls


def add_item(state):
    state[0] += 1
    return state[0]


RARE = {
    "slots": (Slotted, add_slot),
    "array": (lambda: array.array("d", [0.0]), add_item),
    "bytearray": (lambda: bytearray(1), add_item),
}


class Rare(Block):
    """Counts its calls in an object of another class than those that are followed."""

    make, add = RARE["slots"]

    def build(self):
        self.state = type(self).make()

    def forward(self, x):
        scale = 1 + 0.1 * type(self).add(self.state)
        return self.inner(x).sin() * scale


class Jacobian(Block):
    def forward(self, x):
        return x + torch.func.vmap(torch.func.jacrev(lambda v: self.inner(v).sin()))(x).sum(-1)


class GatedRecurrent(Block):
    def build(self):
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn(x[None])[0][0]


class Batched(Block):
    """`vmap` computes a linear layer as a product to which it adds the bias in place."""

    def forward(self, x):
        return x + torch.vmap(lambda row: self.inner(row).tanh())(x)


class Scripted(Block):
    def build(self):
        self.scripted = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), torch.ones(2, 6))

    def forward(self, x):
        return self.inner(self.scripted(x)).sin()


class EndsInTorchScript(Scripted):
    def forward(self, x):
        return self.scripted(self.inner(x))


EXACT = (
    *(Counter, RunningBuffer, LargeBuffer, ReassignedBuffer, Recurrent, ClampedWeights, Spectral, Norms, NumpyNormals),
    *(OwnGenerators, IntermediateInPlace, EarlyExit, Experts, NumpyArray, HoldsSystemRandom, Scripted),
)
STATEFUL = (
    *(GlobalCounter, InputInPlace, HooksInput, HooksWeight, Jacobian, GatedRecurrent, Batched, EndsInTorchScript),
    InnerGradient,  # products that are kept can't be told apart inside it
)
"""Blocks with state that no attribute of a module shows, or operators that can't be run twice: a refusal is as good."""
