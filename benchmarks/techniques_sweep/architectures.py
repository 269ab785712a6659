"""Four techniques on every causal language model and encoder-decoder of transformers that builds small.

    python -m benchmarks.techniques_sweep.architectures [--only MODEL ...] [--techniques NAME ...] [--continue]

Each model trains three steps of SGD in fp32 without dropout, by plain Lightning and with each technique. Models run in
processes of their own. `benchmarks/results/techniques_architectures.json` is written after each; `--only` and
`--techniques` replace those rows and columns, `--continue` runs what isn't there yet.

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

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.processes import each
from benchmarks.record import read_rows, write
from benchmarks.techniques_sweep import tiny
from benchmarks.techniques_sweep.adapters import ByHand, CountedAdapters
from benchmarks.techniques_sweep.runs import Trained, difference, train, unchanged, was_refused
from lightning_memfit.adapters.checkpoint import KEY as ADAPTERS
from lightning_memfit.adapters.checkpoint import merged_state_dict
from lightning_memfit.checkpointing.apply import disable_caches

RESULT = Path(__file__).parents[1] / "results" / "techniques_architectures.json"
TOLERANCE = 1e-4
"""Of losses relative to the plain ones, and of weights relative to how far they moved."""
SECONDS, PROCESSES = 1200.0, 2
"""`kimi_linear` takes longest: without its CUDA kernels a step is 10 s of elementwise operators on pairs of tokens."""
MESSAGE = 400
RATE, ADAPTED_RATE = 0.1, 0.5
_SEEDS = 4


class Model(pl.LightningModule):
    """Any model that computes its own loss."""

    def __init__(self, model: nn.Module, rate: float = RATE) -> None:
        super().__init__()
        self.model = model
        self.rate = rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class _Sampled:
    """Batches of one shape with other tokens."""

    def __init__(self, form: dict[str, Tensor]) -> None:
        keys = form.keys()
        generator = torch.Generator().manual_seed(7)
        self.batches = []
        for _ in range(4):
            batch = {}
            for key in keys:
                value = form[key]
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

    def module(self, rate: float = RATE) -> Model:
        """A new module with the first weights."""
        model, _ = tiny.build(self.name)
        return Model(model, rate)

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


def otherwise_rounded(module: Model, seed: int) -> Model:
    """Change every weight by about one unit in the last place of float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + torch.finfo(torch.float32).eps * signs)
    return module


def chunked_loss(tried: Tried) -> dict[str, Any]:
    from lightning_memfit.techniques.chunked_loss import ChunkedLoss

    def rounded(seed: int) -> Trained:
        return train(otherwise_rounded(tried.module(), seed), tried.data.loader())[0]

    return judged(tried.plain, tried.run(ChunkedLoss(num_chunks=3)), TOLERANCE, rounded=rounded)


def lora(tried: Tried) -> dict[str, Any]:
    from lightning_memfit.techniques.lora import Lora

    return _adapted(tried, [Lora(rank=4)])


def quantized_4(tried: Tried) -> dict[str, Any]:
    return _quantized(tried, 4)


def quantized_8(tried: Tried) -> dict[str, Any]:
    return _quantized(tried, 8)


def _quantized(tried: Tried, bits: int) -> dict[str, Any]:
    from lightning_memfit.techniques.lora import Lora
    from lightning_memfit.techniques.quantized_weights import QuantizedWeights

    return _adapted(tried, [QuantizedWeights(bits), Lora(rank=4)])


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


def checkpointing_full(tried: Tried) -> dict[str, Any]:
    from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing

    return judged(tried.uncached, tried.run(ActivationCheckpointing()), 0.0)


def checkpointing_budget(tried: Tried) -> dict[str, Any]:
    from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing

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
    from lightning_memfit.profile.build import measure_step

    events = measure_step(tried.module(), tried.data.batches[0], callbacks=(callback,)).events
    second = [at for at, phase in events.phases if phase == "forward"][1]  # blocks are checked in the first batch
    return int(events.live_bytes()[second:].max())


TECHNIQUES: dict[str, Callable[[Tried], dict[str, Any]]] = {
    "ChunkedLoss": chunked_loss,
    "Lora": lora,
    "QuantizedWeights, 4 bits": quantized_4,
    "QuantizedWeights, 8 bits": quantized_8,
    "ActivationCheckpointing, full": checkpointing_full,
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
        return {"model": name, "class": tiny.architectures()[name], "not_built": str(reason)[:MESSAGE]}
    verdicts = {}
    for technique in techniques:
        try:
            verdicts[technique] = TECHNIQUES[technique](tried)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            verdicts[technique] = {"verdict": "crashed", "words": f"outside of the run: {words}"[:MESSAGE]}
    return {
        "model": name,
        "class": type(tried.model).__name__,
        "parameters": sum(parameter.numel() for parameter in tried.model.parameters()),
        "verdicts": verdicts,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _rounded(value: float) -> float | str:
    return float(f"{value:.0e}") if math.isfinite(value) else "inf"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tiny.architectures(), metavar="MODEL", help="as in the table")
    parser.add_argument("--techniques", nargs="+", default=list(TECHNIQUES), metavar="NAME")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave rows that are there as they are")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    known = tiny.architectures()
    names = chosen.only or list(known)
    techniques = [full for one in chosen.techniques for full in TECHNIQUES if full.startswith(one)]
    rows = {row["model"]: row for row in read_rows(chosen.output)}
    if chosen.go_on:
        names = [name for name in names if name not in rows]
    for name, row in each(partial(examine, techniques=techniques), names, SECONDS, chosen.processes):
        if isinstance(row, Exception):
            failed = {"verdict": "crashed", "words": f"{type(row).__name__}: {row}"[:MESSAGE]}
            row = {"model": name, "class": known[name], "verdicts": dict.fromkeys(techniques, failed)}
        before = rows.get(name, {}).get("verdicts", {})
        if "verdicts" in row:
            merged = {**before, **row["verdicts"]}
            row["verdicts"] = {column: merged[column] for column in TECHNIQUES if column in merged}
        rows[name] = row
        _show(row)
        _write(chosen.output, [rows[name] for name in known if name in rows])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    command = "python -m benchmarks.techniques_sweep.architectures"  # of all rows, whichever came last
    kept = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    write(path, {"command": command, "steps": 3, "tolerance": TOLERANCE, "budget": BUDGET, "rows": kept})


def _show(row: dict[str, Any]) -> None:
    if "not_built" in row:
        print(f"{row['model']:26} not built: {row['not_built'][:120]}", flush=True)
        return
    cells = " ".join(f"{one['verdict']:9}" for one in row["verdicts"].values())
    print(f"{row['model']:26} {cells} {row.get('seconds', '')} s", flush=True)
    for technique, one in row["verdicts"].items():
        if one["verdict"] in ("crashed", "different"):
            apart = f"{one.get('losses', '')} {one.get('weights', '')}"
            print(f"    {technique}: {apart} {one.get('words', '')[:220]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
