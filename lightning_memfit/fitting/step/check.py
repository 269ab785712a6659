"""`SelfCheck`: whether the parts of a batch give what the batch gives, measured on the user's own step and data.

Samples are run together and in two unequal parts, from one state and twice in a row: what the first turn sets and the
second one reads shows there. Gradients and buffers have to agree. What a step is a mean over is found by trying: the
first of several candidates with which the parts give the whole is taken, and a wrong one can't do harm.

Contract: every micro-batch starts from the buffers and attributes that the batch started from. Afterwards floating
values are the mean over samples, and anything else is what the last micro-batch left. Noise is drawn per micro-batch.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memfit.fitting.recovery.rollback import MetricStates, RandomState
from lightning_memfit.fitting.recovery.step_state import (
    MicroBatchStates,
    Slot,
    StateRules,
    alike,
    copies_of,
    find_slots,
    is_random_source,
    reading_of,
)
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.step.log_rules import LogRules
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.loss_weights import SUM, LossWeights, Rule
from lightning_memfit.fitting.step.outputs import StepLogs, merge_kept
from lightning_memfit.fitting.step.split import BatchSplitter, with_own_tensors
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.state import State, groups_of
from lightning_memfit.reliability.consensus import RankConsensus

_LAST_STEP = 64
_USERS = Rule("users")
_MOVED = 0.01
_ACCEPT = "or accept that they see a micro-batch only: `MicroBatching(allow_batch_statistics=True)`."
_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 0.1
_FLOOR = 1e-2
"""Share of the tolerance that parameters whose own gradient is nearly zero have of the norm of all gradients."""


class NotFiniteError(Exception):
    """Gradients of the samples together are not finite, so that nothing can be told from them."""


# --- noise ------------------------------------------------------------------------------------------------------------

_UNIFORM = {"rand", "rand_like", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal_", "normal"}
_INTEGERS = {"randint", "randint_like", "random_"}
_COINS = {"bernoulli", "bernoulli_"}


class OneNoise(TorchDispatchMode):
    """Gives noise with a row per sample the same values in every row and in every pass; dropout does nothing.

    `randperm` becomes a roll by one, so that mixing of samples shows. All other draws go on, so that one draw for the
    whole batch shows, too.

    Args:
        num_samples: Samples of this pass.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        found = func(*args, **(kwargs or {}))
        if name == "randperm":
            return torch.arange(len(found), device=found.device).roll(1).to(found.dtype)
        is_by_sample = isinstance(found, Tensor) and found.ndim and len(found) == self._num_samples
        if is_by_sample and name in _UNIFORM | _NORMAL | _INTEGERS | _COINS:
            found.copy_(self._row(name, found, args).expand_as(found))
        return found

    @staticmethod
    def _row(name: str, found: Tensor, args: Any) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        shape = found[:1].shape
        if name in _NORMAL:
            row = torch.randn(shape, generator=generator)
        elif name in _INTEGERS:
            row = torch.full(shape, float(int(found.max()) // 2))
        else:
            row = torch.rand(shape, generator=generator)
        if name in _COINS:
            chance = args[0][:1] if name == "bernoulli" else args[1] if len(args) > 1 else 0.5
            row = (row.to(found.device) < chance).float()
        return row.to(found.device, found.dtype)


# --- the check --------------------------------------------------------------------------------------------------------


class SelfCheck:
    """Compares samples together with samples apart: before the first split, at steps 2, 4 ... 64, and at new cuts.

    Args:
        loop: Runs forward and backward.
        splitter: Splits batches.
        weights: Candidates for what the loss is a mean over; those that the comparison refutes are left out.
        consensus: Communication between the ranks, which all check together.
        rules: How logged values are put together.
        device_memory: The device's memory; None if it is not limited, so that any batch fits at once.

    Attributes:
        is_done: Whether a check has passed.
        state_rules: How values on the module are put together.
    """

    is_worth_more = False

    def __init__(
        self,
        loop: MicroBatchLoop,
        splitter: BatchSplitter,
        weights: LossWeights,
        consensus: RankConsensus,
        rules: LogRules,
        device_memory: DeviceMemory | None,
    ) -> None:
        self._loop = loop
        self._splitter = splitter
        self._weights = weights
        self._consensus = consensus
        self._memory = device_memory
        self._logs = rules
        self._slots: dict[str, Slot] = {}
        self._warned: set[str] = set()
        self._num_runs = 0
        self._num_samples = 0
        self._is_short = False
        self.is_done = False
        self.state_rules = StateRules()

    def of_weights(self) -> "SelfCheck":
        """Return a check that learns nothing but what losses are means over."""
        return SelfCheck(self._loop, self._splitter, self._weights, self._consensus, LogRules(), self._memory)

    @property
    def has_doubts(self) -> bool:
        """Whether steps 2, 4, 8 ... are to be checked, too."""
        return self._num_runs <= _LAST_STEP.bit_length()

    @property
    def slots(self) -> list[Slot]:
        """Where the values are that `state_rules` puts together."""
        return [self._slots[name] for name in self.state_rules.names if name in self._slots]

    def look_for(self, names: Iterable[str]) -> None:
        """Put together what micro-batches have been seen to write."""
        slots = find_slots(self._loop.module)
        self._combine({name: slots[name] for name in names if name in slots})

    def refute(self, names: Iterable[str]) -> None:
        """Nothing is put together in a way that micro-batches could refute."""

    def run(self, request: StepRequest, batch: Any, num_samples: int, size: int, has_failed: bool) -> None:
        """Compare samples of a batch, as many as fit.

        Raises:
            MisconfigurationException: If micro-batches would give other weights. Nothing has changed then.
        """
        self._num_runs += 1
        if num_samples < 2:
            return
        self._is_short |= has_failed or self._memory is not None
        count = max(2, min(size, num_samples // 2)) if self._is_short else num_samples
        while True:
            try:
                self._check(request, batch, num_samples, count)
                return
            except Exception as error:
                if not is_out_of_memory(error) or count <= 2:
                    raise
                release(error)
                self._is_short = True
                count = max(2, min(count // 2, size))

    def _check(self, request: StepRequest, batch: Any, num_samples: int, count: int) -> None:
        """Compare some samples, and put everything back."""
        self._num_samples = num_samples
        module, device = self._loop.module, self._loop.trainer.strategy.root_device
        state, random, metrics = State(groups_of([module])), RandomState(device), MetricStates(module)
        begun = metrics.save()
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        try:
            with StepLogs().capture(self._loop.results):
                self._compare(request, batch, num_samples, count, random)
            self.is_done = True
        except NotFiniteError:
            rank_zero_warn("MicroBatching: gradients of the first samples are not finite; the next batch is checked.")
        finally:
            state.restore()
            random.restore()
            metrics.load(begun)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _compare(self, request: StepRequest, batch: Any, num_samples: int, count: int, random: RandomState) -> None:
        _move_weights(self._loop.module)
        groups = groups_of([self._loop.module])
        rest = [num_samples - count] if num_samples > count else []
        whole_start = parts_start = State(groups)

        def turn(start: State, sizes: list[int], shares: list[float]) -> "_Pass":
            start.restore()
            random.restore()
            parts = self._splitter.split(with_own_tensors(batch), [*sizes, *rest])[: len(sizes)]
            return self._run(request, parts, sizes, shares)

        for first in (max(1, count // 3), count - max(1, count // 4)):
            sizes = [first, count - first]
            whole = turn(whole_start, [count], [1.0])
            if not whole.is_finite:
                raise NotFiniteError
            self._combine(whole.written)
            ended = State(groups)
            apart = partial(turn, parts_start, sizes)
            parts = self._first_right(batch, num_samples, sizes, whole, apart)
            if parts is None:
                raise MisconfigurationException(self._reason(sizes, whole, apart))
            self._judge_state(whole, parts)
            whole_start, parts_start = ended, State(groups)

    def _first_right(
        self, batch: Any, num_samples: int, sizes: list[int], whole: "_Pass", turn: Callable[[list[float]], "_Pass"]
    ) -> "_Pass | None":
        """The parts by the first candidate with which they give the whole; the others are refuted if they differ."""
        shares = self._shares(batch, num_samples, sizes)
        tried: dict[tuple[float, ...], _Pass] = {}
        for rule, mine in shares.items():
            key = tuple(round(share, 12) for share in mine)
            if key not in tried:
                tried[key] = turn(mine)
            if not tried[key].is_near(whole):
                continue
            if rule == SUM:
                self._weights.take_sum()
            elif rule != _USERS:
                self._weights.refute(
                    other for other, theirs in shares.items() if other != SUM and abs(theirs[0] - mine[0]) > 1e-9
                )
            return turn(mine)
        return None

    def _shares(self, batch: Any, num_samples: int, sizes: list[int]) -> dict[Rule, list[float]]:
        """By what each candidate multiplies the losses of the parts."""
        first, count = sizes[0], sum(sizes)
        if self._weights.is_users:
            parts = self._splitter.split(batch, [*sizes, *([num_samples - count] if num_samples > count else [])])
            counted = [self._weights.read(part, size).weight for part, size in zip(parts, sizes, strict=False)]
            return {_USERS: [one / (sum(counted) or 1.0) for one in counted]}
        if self._weights.is_sum:
            return {SUM: [1.0, 1.0]}
        found: dict[Rule, list[float]] = {}
        for rule, rows in self._weights.weights(batch, num_samples).items():
            if total := sum(rows[:count]):
                found[rule] = [sum(rows[:first]) / total, sum(rows[first:count]) / total]
        return found | {SUM: [1.0, 1.0]}

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _run(self, request: StepRequest, parts: list[Any], sizes: list[int], shares: list[float]) -> "_Pass":
        """Forward and backward of some parts, accumulated as training does it."""
        module = self._loop.module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.grad = None
        before, slots = _readings(module), find_slots(module)
        states = MicroBatchStates(self.state_rules, copies_of(slots.values())) if len(parts) > 1 else None
        versions = {name: parameter._version for name, parameter in trained.items()}
        for index, (part, size, share) in enumerate(zip(parts, sizes, shares, strict=True)):
            if states is not None and index:
                states.before_next()
            with OneNoise(size):
                loss = self._forward(request, part, size, share, size < self._num_samples, trained)
                if loss is not None and share:
                    self._loop.backward(request, loss, announce=False)
            if states is not None:
                states.add(size, share)
        if written := [name for name, parameter in trained.items() if parameter._version != versions[name]]:
            raise MisconfigurationException(_written(written[0]))
        if states is not None:
            states.finish(merge_kept)
        after, slots = _readings(module), find_slots(module)
        changed = {n: slots[n] for n in slots if n in after and not alike(before.get(n), after[n], 0.0)}
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach() for n, p in trained.items()}
        return _Pass(gradients, after, changed)

    def _forward(
        self, request: StepRequest, part: Any, size: int, share: float, is_part: bool, trained: dict[str, Any]
    ) -> Tensor | None:
        """Forward of a part, without the gradients so far; those that it leaves itself are cleared."""
        held = [(parameter, parameter.grad) for parameter in trained.values()]
        for parameter, _ in held:
            parameter.grad = None
        try:
            return self._loop.forward(request, part, 1.0 / share if share else 1.0).closure_loss
        except Exception as error:
            if not is_part or is_out_of_memory(error) or isinstance(error, MisconfigurationException):
                raise
            raise MisconfigurationException(
                f"`training_step` can't be run on {size} samples of the batch alone: {type(error).__name__}: {error}. "
                "If the batch is cut in the wrong place, or the module needs the longest of its samples, define "
                "`split_batch(batch, sizes)` on the LightningModule."
            ) from error
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient

    # --- what the step writes -----------------------------------------------------------------------------------------

    def _combine(self, written: dict[str, Slot]) -> None:
        self._slots.update(written)
        floating = {name for name, slot in self._slots.items() if _is_floating(slot.read())}
        self.state_rules = StateRules(averaged=frozenset(floating), restored=frozenset(self._slots.keys() - floating))

    def _judge_state(self, whole: "_Pass", parts: "_Pass") -> None:
        module = self._loop.module
        kept = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
        names = whole.after.keys() | parts.after.keys()
        differ = sorted(n for n in names if not alike(whole.after.get(n), parts.after.get(n), 1e-6))
        if odd := [name for name in differ if name in kept]:
            raise MisconfigurationException(_written(odd[0]))
        if new := set(differ) - self._warned:
            self._warned |= new
            rank_zero_warn(
                f"`training_step` changes {', '.join(f'`{name}`' for name in sorted(new))} of the module per "
                "micro-batch: not what the whole batch would make of it. Gradients don't depend on it."
            )

    def _reason(self, sizes: list[int], whole: "_Pass", turn: Callable[[list[float]], "_Pass"]) -> str:
        head = (
            f"Micro-batches would give other weights than the whole batch: the gradient of {sum(sizes)} samples is not "
            f"the mean of those of {sizes[0]} and {sizes[1]} of them"
        )
        one, two = turn([1.0, 0.0]), turn([0.0, 1.0])
        columns = torch.stack([one.flat(), two.flat()], 1)
        if bool(columns.isfinite().all()):
            a, b = torch.linalg.lstsq(columns, whole.flat()[:, None]).solution.flatten().tolist()
            if turn([a, b]).is_near(whole):
                return f"{head}: they count {a:.4g} and {b:.4g} times. Define `loss_weight(batch)`, or return a mean."
        return f"{head}, however they are weighted. Samples affect each other, {_ACCEPT}"


class _Pass:
    """What one pass left.

    Args:
        gradients: Of trained parameters, by name.
        after: Readings of what is on the module.
        written: Where it has changed.
    """

    def __init__(self, gradients: dict[str, Tensor], after: dict[str, Any], written: dict[str, Slot]) -> None:
        self._gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        self.after = after
        self.written = written

    @property
    def is_finite(self) -> bool:
        """Whether all gradients are."""
        return all(bool(gradient.isfinite().all()) for gradient in self._gradients.values())

    def flat(self) -> Tensor:
        """All gradients in one row."""
        return torch.cat([gradient.flatten() for gradient in self._gradients.values()]).double()

    def is_near(self, other: "_Pass") -> bool:
        """Whether gradients are those of another pass, up to rounding."""
        norms = {name: float(gradient.norm()) for name, gradient in other._gradients.items()}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, gradient in other._gradients.items():
            relative = _RELATIVE.get(gradient.dtype, _COARSE)
            allowed = relative * norms[name] + _FLOOR * relative * total + 1e-300
            if not float((self._gradients[name] - gradient).norm()) <= allowed:
                return False
        return True


def _readings(module: Any) -> dict[str, Any]:
    values = {name: slot.read() for name, slot in find_slots(module).items()}
    return {name: reading_of(value) for name, value in values.items() if not is_random_source(value)}


def _is_floating(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


@torch.no_grad()
def _move_weights(module: Any) -> None:
    """Move trained weights a little, so that heads and adapters that start at zero take part."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
            signs = torch.arange(parameter.numel(), device=parameter.device).mul(0.7).sin().reshape(parameter.shape)
            scale = _MOVED * float(parameter.float().std()) if parameter.numel() > 1 else _MOVED
            parameter.data.add_(signs.to(parameter.dtype), alpha=scale or _MOVED)


def _written(name: str) -> str:
    return (
        f"`training_step` changes `{name}` of the module, and what micro-batches make of it is not what the whole "
        f"batch makes of it. Change it in `on_train_batch_end`, which is called once per batch, {_ACCEPT}"
    )
