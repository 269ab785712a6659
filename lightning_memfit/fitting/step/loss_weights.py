"""What the loss of a batch is a mean over: what decides how much each micro-batch weighs.

A mean over the effective batch is the weighted mean of the means over its micro-batches, where the weight of a
micro-batch is the number its mean was taken over: samples, label tokens that are not masked, the sum of a mask, of
weights per sample or per class. Which of them it is can't be read off a module. So every rule that the batch allows is
a candidate until a comparison of gradients refutes it (`refute`). While all candidates give the same weights it does
not matter which is right; the first batch on which they differ has to be compared (`LocalBatch.is_disputed`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.fitting.step.split import Path, parts_of

LossWeight = Callable[[Any], "float | Tensor"]

IGNORE_INDEX = -100
_IGNORED = (IGNORE_INDEX, -1, 0, 255)  # what losses, tokenizers and segmentation data sets leave out
_MAX_CLASSES = 100_000
_EQUAL = 1e-12


class LocalBatch:
    """The number of samples of this device's loader batch, and their weight in the loss.

    `rows` has the weight of every sample, `rivals` those by other rules that may be right; None stands for one each.
    """

    def __init__(
        self,
        num_samples: int,
        weight: float,
        rows: list[float] | None = None,
        rivals: Sequence[list[float] | None] = (),
        loss_weight: LossWeight | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.weight = weight
        self._rows = rows
        self._rivals = rivals
        self._loss_weight = loss_weight

    def is_disputed(self, sizes: list[int]) -> bool:
        """Whether rules that nothing has refuted give micro-batches of these sizes different weights."""
        if not self._rivals or len(sizes) == 1:
            return False
        found, *others = (_sums(rows or [1.0] * self.num_samples, sizes) for rows in (self._rows, *self._rivals))
        return not all(_proportional(found, other) for other in others)

    def weights_of(self, parts: list[Any], sizes: list[int]) -> list[float]:
        """Return the weight of each micro-batch.

        Raises:
            ValueError: If the user's weights for the parts don't add up to that for the whole.
        """
        if self._loss_weight is not None:
            weights = [float(self._loss_weight(part)) for part in parts]
            if abs(sum(weights) - self.weight) > 1e-6 * max(abs(self.weight), 1.0):
                raise ValueError(
                    f"`loss_weight` of the parts {weights} adds up to {sum(weights)}, of the whole batch to "
                    f"{self.weight}. Return what the loss is a mean over: a count that adds up."
                )
            return weights
        if self._rows is None:
            return [float(size) for size in sizes]
        return _sums(self._rows, sizes)


@dataclass(frozen=True)
class Rule:
    """One way to weigh samples.

    Attributes:
        kind: `samples`; `sum` (the loss is a sum, nothing is weighed); `unmasked`, entries other than `value`; `total`,
            the sum of entries, as of a mask; `classes`, the sum of the entries' class weights; `users`.
        path: Tensor of the batch that it reads.
        value: The ignored entry, or the name of the class weights.
        start: First column that counts, 1 where the loss predicts the next token.
        stop: How many columns at the end don't count.
    """

    kind: str
    path: Path = ()
    value: Any = None
    start: int = 0
    stop: int = 0

    @property
    def is_usual(self) -> bool:
        """Whether losses are usually means over this, so that one comparison is proof enough."""
        is_label = self.kind == "unmasked" and self.value == IGNORE_INDEX and self.path[-1:] == ("labels",)
        return self.kind in ("samples", "sum", "users") or is_label


SAMPLES = Rule("samples")
SUM = Rule("sum")


class LossWeights:
    """Counts what the loss of a batch is a mean over."""

    def __init__(self, hook: LossWeight | None = None, module: nn.Module | None = None) -> None:
        self._hook = hook
        self._shifts = module is not None and predicts_next_token(module)
        self._ignored = _ignored_indices(module)
        self._classes = _class_weights(module)
        self._refuted: set[Rule] = set()
        self._known: dict[tuple[Any, ...], list[Rule]] = {}
        self.is_sum = False  # whether losses add up instead of being averaged

    @property
    def is_users(self) -> bool:
        """Whether the user's function decides."""
        return self._hook is not None

    def read(self, batch: Any, num_samples: int, with_rivals: bool = True) -> LocalBatch:
        """Count and weigh the samples of a batch, by all candidates or the likeliest. Waits for the device once."""
        if self._hook is not None:
            return LocalBatch(num_samples, float(self._hook(batch)), loss_weight=self._hook)
        rules = self.candidates(batch, num_samples)
        rows, *rivals = self._rows(batch, num_samples, rules if with_rivals else rules[:1])
        return LocalBatch(num_samples, float(num_samples) if rows is None else float(sum(rows)), rows, rivals)

    def weights(self, batch: Any, num_samples: int) -> dict[Rule, list[float]]:
        """Return the weight of every sample under each candidate."""
        rules = self.candidates(batch, num_samples)
        found = self._rows(batch, num_samples, rules)
        return {rule: row or [1.0] * num_samples for rule, row in zip(rules, found, strict=True)}

    def candidates(self, batch: Any, num_samples: int) -> list[Rule]:
        """Return the rules that nothing has refuted for batches like this one, the likeliest first."""
        if self.is_sum:
            return [SAMPLES]
        key = tuple((path, leaf.dtype, leaf.ndim) for path, leaf in _weighable(batch, num_samples))
        rules = self._known.get(key)
        if rules is None:
            found = [rule for rule in self.all_rules(batch, num_samples) if rule not in self._refuted]
            rules = self._known[key] = found or [SAMPLES]
        return rules

    def refute(self, rules: Iterable[Rule]) -> None:
        """Leave out rules that a comparison of gradients has shown to be wrong."""
        self._refuted.update(rules)
        self._known = {
            key: [r for r in known if r not in self._refuted] or [SAMPLES] for key, known in self._known.items()
        }

    def ignore(self, values: Iterable[int]) -> None:
        """Take entries of labels that the loss was seen to leave out for candidates, too."""
        new = [value for value in sorted(values) if value not in self._ignored]
        if new:
            self._ignored = (*self._ignored, *new)
            self._known.clear()

    @property
    def refuted(self) -> frozenset[Rule]:
        """Rules that a comparison has shown to be wrong."""
        return frozenset(self._refuted)

    def take_sum(self) -> None:
        """Add losses up from now on."""
        self.is_sum = True

    # --- rules and what they count ----------------------------------------------------------------------------------

    def all_rules(self, batch: Any, num_samples: int) -> list[Rule]:
        """Return the rules that a batch allows, refuted or not, the likeliest first."""
        first: list[Rule] = []
        rest: list[Rule] = []
        for path, leaf in _weighable(batch, num_samples):
            columns = leaf.ndim == 2 and leaf.shape[1] > 1
            shifts = [(0, 0), (1, 0)] if columns else [(0, 0)]
            if leaf.ndim == 1 or leaf.dtype == torch.bool or _is_mask(leaf):
                ends = [*shifts, (0, 1)] if columns else shifts
                masks = [Rule("total", path, None, *shift) for shift in ends]
            else:
                masks = []
            if leaf.dtype.is_floating_point or leaf.dtype == torch.bool:
                rest += masks
                continue
            if columns and self._shifts:
                shifts.reverse()
            unmasked = [Rule("unmasked", path, value, *shift) for value in self._ignored for shift in shifts]
            if path and path[-1] == "labels":
                first += [rule for rule in unmasked if rule.value == IGNORE_INDEX]
            rest += [rule for rule in unmasked if rule not in first]
            rest += [Rule("classes", path, name, *shift) for name in self._classes for shift in shifts]
            rest += masks
        return [*first, SAMPLES, *rest]

    def _rows(self, batch: Any, num_samples: int, rules: list[Rule]) -> list[list[float] | None]:
        """Return the weight of each sample under each rule; None where every sample weighs one."""
        leaves = dict(_weighable(batch, num_samples))
        counted = [
            torch.cat([self._count(part, rule) for part in leaves[rule.path].split(_ROWS_AT_ONCE)])
            for rule in rules
            if rule != SAMPLES
        ]
        found = iter(torch.stack(counted).tolist() if counted else ())  # waits for the device once
        return [None if rule == SAMPLES else next(found) for rule in rules]

    def _count(self, leaf: Tensor, rule: Rule) -> Tensor:
        if leaf.ndim == 2:
            leaf = leaf[:, rule.start : leaf.shape[1] - rule.stop]
        if rule.kind == "unmasked":
            counted = leaf.ne(rule.value)
        elif rule.kind == "classes":
            classes = self._classes[rule.value].detach().to(leaf.device)
            inside = (leaf >= 0) & (leaf < len(classes))
            counted = torch.where(inside, classes[leaf.clamp(0, len(classes) - 1).long()], 0.0)
        else:
            counted = leaf
        return counted.reshape(len(leaf), -1).sum(1, dtype=torch.float64)


_ROWS_AT_ONCE = 256
"""Samples that are counted at once: counting must not take more memory than a micro-batch."""


def _sums(rows: list[float], sizes: list[int]) -> list[float]:
    found = iter(rows)
    return [float(sum(islice(found, size))) for size in sizes]


def _proportional(one: list[float], other: list[float]) -> bool:
    if one == other or (_are_alike(one) and _are_alike(other)):  # as most are; it is much faster
        return True
    one_total, other_total = sum(one), sum(other)
    if not one_total or not other_total:
        return one_total == other_total
    return all(abs(a / one_total - b / other_total) <= _EQUAL for a, b in zip(one, other, strict=True))


def _are_alike(weights: list[float]) -> bool:
    return weights[0] != 0.0 and weights.count(weights[0]) == len(weights)


def _weighable(batch: Any, num_samples: int) -> list[tuple[Path, Tensor]]:
    """Return the tensors of a batch that may decide what its loss is a mean over: one row of numbers per sample."""
    return [
        (path, part)
        for path, part in parts_of(batch)
        if isinstance(part, Tensor)
        and len(part) == num_samples
        and part.numel()
        and not part.is_complex()
        and part.layout == torch.strided
        and (part.ndim <= 2 or not part.is_floating_point())
    ]


def _is_mask(leaf: Tensor) -> bool:
    return leaf.ndim > 1 and all(bool(((part == 0) | (part == 1)).all()) for part in leaf.split(_ROWS_AT_ONCE))


def _ignored_indices(module: nn.Module | None) -> tuple[int, ...]:
    """Return the entries that losses may leave out: the usual ones, and those the module's own parts name."""
    found = dict.fromkeys(_IGNORED)
    for child in () if module is None else module.modules():
        for owner, name in ((child, "ignore_index"), (getattr(child, "config", None), "pad_token_id")):
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                found[value] = None
    return tuple(found)


def _class_weights(module: nn.Module | None) -> dict[str, Tensor]:
    """Return what may be weights of classes: one-dimensional tensors of floating point that are not trained."""
    if module is None:
        return {}
    found = {name: buffer for name, buffer in module.named_buffers() if buffer is not None}
    own = vars(module).items()
    found |= {name: value for name, value in own if isinstance(value, Tensor) and not value.requires_grad}
    return {n: t for n, t in found.items() if t.ndim == 1 and t.is_floating_point() and 1 < len(t) <= _MAX_CLASSES}


def predicts_next_token(module: nn.Module) -> bool:
    """Whether a Hugging Face model in the module shifts the labels before its loss, as `ForCausalLMLoss` does.

    Decoders of encoder-decoder models get their labels unshifted and don't count.
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is None or not hasattr(child, "loss_function") or not hasattr(config, "is_encoder_decoder"):
            continue
        if type(child).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return True
        if type(child).__name__.endswith("ForConditionalGeneration"):
            return not config.is_encoder_decoder
    return False
