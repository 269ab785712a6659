"""Four techniques on every causal language model and encoder-decoder of transformers that builds small.

Each model trains three steps of SGD in fp32 without dropout, by plain Lightning and with each technique.

Verdicts:

- `equal`: losses and weights are those of the plain run: bit for bit with checkpointing, else within TOLERANCE, or
  closer than those of a plain run whose first weights were rounded differently, where a model amplifies that
- `refused`: an error of ours said why, before anything changed
- `crashed`: another error, or one that came after weights had changed
- `different`: losses or weights are others

What is compared with: `ChunkedLoss` with plain Lightning; `ActivationCheckpointing` with plain Lightning whose
key/value caches are off, as a cache lays keys out otherwise in memory, by which some processors round otherwise;
`Lora` with adapters that torch's parametrizations add to the weights; `QuantizedWeights` with the same on a plain
module whose weights were quantized and dequantized by bitsandbytes (4 bits) or by its formula (8 bits).
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.runner import Benchmark, Options, Stage, named
from benchmarks.techniques_sweep import tiny
from benchmarks.techniques_sweep.adapters import ByHand, CountedAdapters
from benchmarks.techniques_sweep.runs import Trained, difference, train, unchanged, was_refused
from benchmarks.text import by_words, table
from benchmarks.training import OwnLoss
from lightning_memfit.adapters.checkpoint import KEY as ADAPTERS
from lightning_memfit.adapters.checkpoint import merged_state_dict
from lightning_memfit.checkpointing.apply import disable_caches
from lightning_memfit.profile.build import measure_step
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.chunked_loss import ChunkedLoss
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.quantized_weights import QuantizedWeights

RESULT = "techniques_architectures.json"
TOLERANCE = 1e-4
"""Of losses relative to the plain ones, and of weights relative to how far they moved."""
SECONDS = 1200.0
"""`kimi_linear` takes longest: without its CUDA kernels a step is 10 s of elementwise operators on pairs of tokens."""
MESSAGE = 400
RATE, ADAPTED_RATE = 0.1, 0.5
_SEEDS = 4


class _Sampled:
    """Batches of one shape with other tokens."""

    def __init__(self, form: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.batches = []
        for _ in range(4):
            batch = dict[str, Tensor]()
            for key, value in form.items():
                if key == "labels":
                    fresh = batch["input_ids"] if value.shape == batch["input_ids"].shape else _tokens(value, generator)
                    batch[key] = torch.where(value == -100, value, fresh)
                else:
                    batch[key] = _tokens(value, generator) if key == "input_ids" else value
            self.batches.append(batch)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def _tokens(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(20, tiny.VOCABULARY, like.shape, generator=generator)


class Tried:
    """One architecture, and its plain run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, form = tiny.build(name)
        self.start = {n: v.clone() for n, v in self.model.state_dict().items()}
        self.data = _Sampled(form)
        self.plain, _ = train(self.module(), self.data.loader())
        if self.plain.error is not None:
            raise tiny.NotBuilt(f"plain Lightning: {self.plain.words}")

    @cached_property
    def uncached(self) -> Trained:
        """The plain run of a model that keeps no keys and values, like one with checkpointing."""
        module = self.module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disable_caches(module)
        return train(module, self.data.loader())[0]

    def module(self, rate: float = RATE) -> OwnLoss:
        """A new module with the first weights."""
        model, _ = tiny.build(self.name)
        return OwnLoss(model, partial(torch.optim.SGD, lr=rate))

    def run(self, *callbacks: pl.Callback, rate: float = RATE) -> Trained:
        return train(self.module(rate), self.data.loader(), callbacks)[0]


# --- verdicts -------------------------------------------------------------------------------------------------------


def judged(
    expected: Trained,
    found: Trained,
    tolerance: float,
    remark: str = "",
    rounded: Callable[[int], Trained] | None = None,
) -> dict[str, Any]:
    """The verdict on a run, with the differences or the words.

    Args:
        expected: What it is compared with.
        found: The run.
        tolerance: Largest difference that counts as none.
        remark: Words for the table.
        rounded: Makes the run to compare with from weights that are rounded differently, given a seed.
    """
    if found.error is not None:
        words = found.words
        if was_refused(found):
            return {"verdict": "refused", "words": words[:MESSAGE]}
        when = f"after {found.steps} steps: " if found.steps else ""
        if not found.steps and not unchanged(found.before, found.after):
            when = "with other weights left: "
        return {"verdict": "crashed", "words": (when + words)[:MESSAGE]}
    apart = difference(expected, found)
    row = {"losses": _rounded(apart.losses), "weights": _rounded(apart.weights)}
    if max(apart.losses, apart.weights) <= tolerance:
        return {"verdict": "equal", **row} | ({"words": remark} if remark else {})
    if rounded is not None:
        others = []
        for seed in range(_SEEDS):
            other = rounded(seed)
            other.before = expected.before
            others.append(difference(expected, other))
        losses, weights = max(one.losses for one in others), max(one.weights for one in others)
        if apart.losses <= max(tolerance, losses) and apart.weights <= max(tolerance, weights):
            changes = f"losses by {_rounded(losses)} and weights by {_rounded(weights)}"
            amplified = f"rounding the first weights differently changes {changes}"
            return {"verdict": "equal", **row, "words": f"{remark}; {amplified}" if remark else amplified}
    return {"verdict": "different", **row, "words": f"{apart.name} {remark}".strip()}


def otherwise_rounded(module: OwnLoss, seed: int) -> OwnLoss:
    """Change every weight by about one unit in the last place of float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + torch.finfo(torch.float32).eps * signs)
    return module


def chunked_loss(tried: Tried) -> dict[str, Any]:
    def rounded(seed: int) -> Trained:
        return train(otherwise_rounded(tried.module(), seed), tried.data.loader())[0]

    return judged(tried.plain, tried.run(ChunkedLoss(num_chunks=3)), TOLERANCE, rounded=rounded)


def _adapted(tried: Tried, callbacks: list[pl.Callback]) -> dict[str, Any]:
    watch = CountedAdapters()
    found = tried.run(*callbacks, watch, rate=ADAPTED_RATE)
    if found.error is not None:
        return judged(tried.plain, found, TOLERANCE)
    module = tried.module(ADAPTED_RATE)
    adapters = {"rank": 4, "alpha": 16.0, "layers": sorted(watch.found)}
    trained = {name: value for name, value in found.after.items() if value.is_floating_point()}
    merged = merged_state_dict(module, {ADAPTERS: adapters, "state_dict": trained})
    found.after = {name: value.clone() for name, value in merged.items() if torch.is_tensor(value)}
    by_hand = ByHand(module, watch.found)
    expected, _ = train(module, tried.data.loader())
    if expected.error is not None:
        return {"verdict": "crashed", "words": f"by hand: {expected.words}"[:MESSAGE]}
    expected.before, expected.after = tried.plain.before, by_hand.merged()
    remark = f"{len(watch.found)} layers" + (f", {watch.unused} never used" if watch.unused else "")

    def rounded(seed: int) -> Trained:
        other = otherwise_rounded(tried.module(ADAPTED_RATE), seed)
        adapters = ByHand(other, watch.found)
        run, _ = train(other, tried.data.loader())
        run.after = adapters.merged()
        return run

    return judged(expected, found, TOLERANCE, remark, rounded)


def checkpointing_budget(tried: Tried) -> dict[str, Any]:
    callback = ActivationCheckpointing(budget=BUDGET)
    row = judged(tried.uncached, tried.run(callback), 0.0)
    if row["verdict"] != "equal" or callback.resolved is None:
        return row
    plan = callback.resolved.plan
    again = ActivationCheckpointing(choices=plan.choices)
    measured = _peak(tried, again)
    kept = f"peak {measured / callback.resolved.limit_bytes:.3f} of the budget"
    if measured > callback.resolved.limit_bytes * 1.005:
        return row | {"verdict": "different", "words": kept}
    return row | {"words": f"{kept}, {sum(choice != 'none' for choice in plan.choices)} of {len(plan.choices)} blocks"}


BUDGET = "60%"


def _peak(tried: Tried, callback: Any) -> int:
    events = measure_step(tried.module(), tried.data.batches[0], callbacks=(callback,)).events
    second = [at for at, phase in events.phases if phase == "forward"][1]  # blocks are checked in the first batch
    return int(events.live_bytes()[second:].max())


TECHNIQUES: dict[str, Callable[[Tried], dict[str, Any]]] = {
    "ChunkedLoss": chunked_loss,
    "Lora": lambda tried: _adapted(tried, [Lora(rank=4)]),
    "QuantizedWeights, 4 bits": lambda tried: _adapted(tried, [QuantizedWeights(4), Lora(rank=4)]),
    "QuantizedWeights, 8 bits": lambda tried: _adapted(tried, [QuantizedWeights(8), Lora(rank=4)]),
    "ActivationCheckpointing, full": lambda tried: judged(tried.uncached, tried.run(ActivationCheckpointing()), 0.0),
    "ActivationCheckpointing, budget": checkpointing_budget,
}
"""Columns of the table."""


def examine(name: str, techniques: Sequence[str] = tuple(TECHNIQUES)) -> dict[str, Any]:
    """The row of one architecture.

    Args:
        name: One of `tiny.architectures`.
        techniques: Columns to fill.
    """
    started = time.perf_counter()
    try:
        tried = Tried(name)
    except tiny.NotBuilt as reason:
        return {"class": tiny.architectures()[name], "not_built": str(reason)[:MESSAGE]}
    verdicts = {}
    for technique in techniques:
        try:
            verdicts[technique] = TECHNIQUES[technique](tried)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            verdicts[technique] = {"verdict": "crashed", "words": f"outside of the run: {words}"[:MESSAGE]}
    return {
        "class": type(tried.model).__name__,
        "parameters": sum(parameter.numel() for parameter in tried.model.parameters()),
        "verdicts": verdicts,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _rounded(value: float) -> float | str:
    return float(f"{value:.0e}") if math.isfinite(value) else "inf"


# --- the page ---------------------------------------------------------------------------------------------------------


_VERDICTS = ("equal", "refused", "crashed", "different")


def text(document: dict[str, Any]) -> str:
    """How often each verdict was given, the words of what isn't equal, and what can't be built."""
    rows = document["rows"]
    built = [row for row in rows if "verdicts" in row]
    lines = []
    for technique in TECHNIQUES:
        found = [row["verdicts"][technique] for row in built if technique in row["verdicts"]]
        counts = Counter(one["verdict"] for one in found)
        apart = [max(float(one["losses"]), float(one["weights"])) for one in found if one["verdict"] == "equal"]
        lines.append([technique, *(str(counts[verdict]) for verdict in _VERDICTS), f"{max(apart, default=0.0):.0e}"])
    return "\n".join(
        [
            f"{len(built)} of {len(rows)} architectures build small.",
            "",
            table(["technique", *_VERDICTS, "largest difference where equal"], lines),
            *_not_equal(built),
            "",
            "## Not built",
            ", ".join(f"`{row['name']}`" for row in rows if "not_built" in row) + ": the results say why.",
        ]
    )


def _not_equal(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The words of what isn't equal; techniques that have the same ones stand together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for technique in TECHNIQUES:
        items = by_words(
            (verdict["verdict"], verdict.get("words", "").replace(row["class"], "The model"), f"`{row['name']}`")
            for row in rows
            if (verdict := row["verdicts"].get(technique, {"verdict": "equal"}))["verdict"] != "equal"
        )
        found.setdefault(tuple(items), []).append(technique)
    for items_of, techniques in found.items():
        if items_of:
            yield from ("", f"**{'; '.join(techniques)}**", "", *items_of)


def _say(row: dict[str, Any]) -> str:
    if "not_built" in row:
        return f"not built: {row['not_built'][:120]}"
    wrong = {name: one for name, one in row["verdicts"].items() if one["verdict"] in ("crashed", "different")}
    return " ".join(f"{one['verdict']:9}" for one in row["verdicts"].values()) + f" {wrong or ''}"


def _figures(rows: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    kept = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    return {"steps": 3, "tolerance": TOLERANCE, "budget": BUDGET, "rows": kept}


BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(tiny.architectures()),
    (Stage(lambda case, options, row: examine(case.name), timed=False),),
    _figures,
    _say,
    seconds=SECONDS,
)
