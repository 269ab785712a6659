"""Random combinations of techniques with random options, on six modules of different kinds.

    python -m benchmarks.techniques_sweep.combinations [--only SEED ...] [--continue] [--number 300]

Each seed chooses a module, clipping, and at most one technique of each kind with options. What trains, trains three
steps on the CPU, and every loss is compared with the run that the techniques promise: plain Lightning, with the other
optimizer or the adapters (added by hooks) where they are chosen. What may differ by how much is `TOLERANCES`, beside
`Numerics`; and what is further apart, by that and as much as rounding makes of the promised run itself, which is run in
float64 then. What doesn't train has to be refused by `Setting.validate` and by the run, in the same words.

Verdicts:

- `equal`: every loss is within the tolerance
- `refused`: the run was refused before anything changed, in words that `validate` also says
- `refused on the batch`: the same, but only a trial on the real batch could tell, and `validate` has none
- `disagree`: only one of the two refused, or in other words
- `crashed`, `different`: as they say
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import each
from benchmarks.record import read_rows, write
from benchmarks.techniques_sweep import modules
from benchmarks.techniques_sweep.adapters import Adapters, ByHand
from benchmarks.techniques_sweep.runs import Trained, of_losses, train, was_refused
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.core.precision import trainer_options
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import KINDS, TOLERANCES

RESULT = Path(__file__).parents[1] / "results" / "techniques_combinations.json"
NUMBER, SECONDS, PROCESSES, MESSAGE = 300, 240.0, 2, 400

_LORA = [{}, {"rank": 1}, {"rank": 4, "alpha": 4.0}]
_STATES = [{}, {"min_8bit_size": 0}, {"min_8bit_size": 256, "keep_32bit_embeddings": False}]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "lora": _LORA,
    "qlora": _LORA,
    "lora_8bit": _LORA,
    "optimizer_8bit": _STATES,
    "paged_optimizer": [{}],
    "paged_optimizer_8bit": _STATES,
    "lion_8bit": _STATES,
    "bf16_stochastic_rounding": [{}, {"chunk_elements": 4096, "seed": 3}],
    "chunked_loss": [{}, {"num_chunks": 1}, {"num_chunks": 3}, {"num_chunks": 50}],
    "activation_checkpointing": [
        {}, {"mode": "every", "every": 2}, {"mode": "selective", "keep": ["matmul"]},
        {"mode": "selective", "keep": ["matmul", "attention"]}, {"mode": "offload"}, {"mode": "none"},
        {"budget": "50%"}, {"budget": "auto"}, {"budget": "1GiB"},
    ],
    "attention_kernel": [
        {}, {"implementation": "eager"},
        {"implementation": "flash_attention_2"},
    ],
    "data_loading": [{}, {"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}],
    "micro_batching": [{"micro_batch_size": 4}, {"micro_batch_size": 3}, {"micro_batch_size": 8, "recover": False}],
}  # fmt: skip
"""Options that are drawn from, by technique; all others have none."""

_SHARE = dict.fromkeys(KINDS, 0.25) | {"compile": 0.05, "matmul": 0.02, "batching": 0.15}
"""How often a kind is chosen."""
_OF_TRANSFORMERS = ("loss", "attention")
"""Kinds that are chosen twice as often for models of transformers, and else rarely."""
_SLOW = ("torchao_adamw_4bit",)
"""Optimizers that compile their steps: drawn rarely."""
_CLIPPING: list[dict[str, Any]] = [
    {}, {}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]  # fmt: skip


class Drawn:
    """What a seed chooses.

    Attributes:
        name: The module.
        setting: The techniques.
        trainer: Further options of the Trainer.
        limited: Whether there is a `MemoryLimit`.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.name = draw.choice(self.names())
        self.trainer = draw.choice(_CLIPPING)
        self.limited = draw.random() < 0.1
        setting = Setting()
        for kind in KINDS:
            of_kind = [t.name for t in TECHNIQUES if t.kind == kind and (t.name not in _SLOW or draw.random() < 0.2)]
            share = _SHARE[kind]
            if kind in _OF_TRANSFORMERS:
                share = 0.5 if self.name in ("text", "encoder-decoder") else 0.03
            if of_kind and draw.random() < share:
                name = draw.choice(of_kind)
                setting = setting.choose(name, **draw.choice(OPTIONS.get(name, [{}])))
        self.setting = setting

    @staticmethod
    def names() -> list[str]:
        """All modules."""
        return list(modules.MODULES)

    def facts(self) -> Facts:
        module = modules.build(self.name)
        return read_facts(
            module,
            "cpu",
            optimizer=module.configure_optimizers(),
            loader=modules.loader(self.name),
            callbacks=self.others(),
            **self.trainer,
        )

    def others(self) -> list[Any]:
        from lightning_memfit.device.limit import MemoryLimit

        return [MemoryLimit("1GiB")] if self.limited else []

    def tolerance(self) -> float:
        return sum(TOLERANCES[one] for one in self.setting.numerics) or TOLERANCES["exact"]


def examine(seed: int) -> dict[str, Any]:
    """The row of one seed."""
    started = time.perf_counter()
    drawn = Drawn(seed)
    row: dict[str, Any] = {
        "seed": seed,
        "module": drawn.name,
        "techniques": {choice.name: dict(choice.options) for choice in drawn.setting.chosen},
        "trainer": drawn.trainer | ({"MemoryLimit": "1GiB"} if drawn.limited else {}),
    }
    said = drawn.setting.validate(drawn.facts())
    watch, found = Adapters(), Trained()
    try:
        callbacks = drawn.setting.callbacks()
    except (ValueError, ModuleNotFoundError) as error:
        found.error = error
    else:
        options = trainer_options([*drawn.others(), *callbacks, watch], drawn.setting.precision)
        callbacks = options.pop("callbacks")
        loader = modules.loader(drawn.name)
        found, _ = train(modules.build(drawn.name), loader, callbacks, **drawn.trainer, **options)
    row |= _verdict(drawn, said, found, watch)
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _verdict(drawn: Drawn, said: list[str], found: Trained, watch: Adapters) -> dict[str, Any]:
    words = found.words
    if found.error is not None and not was_refused(found):
        return {"verdict": "crashed", "words": f"after {found.steps} steps: {words}"[:MESSAGE], "validate": said}
    if found.error is not None:
        if any(reason.partition(": ")[2] in words for reason in said):
            return {"verdict": "refused", "words": words[:MESSAGE]}
        verdict = "disagree" if said or not _needs_the_batch(words) else "refused on the batch"
        return {"verdict": verdict, "words": words[:MESSAGE], "validate": said}
    if said:
        return {"verdict": "disagree", "words": "the run trained", "validate": said}
    expected = _expected(drawn, watch)
    if expected.error is not None:
        return {"verdict": "crashed", "words": f"the reference: {expected.words}"[:MESSAGE]}
    apart, tolerance = of_losses(expected.losses, found.losses), drawn.tolerance()
    if apart > tolerance:
        tolerance += of_losses(_expected(drawn, watch, double=True).losses, expected.losses)
    row = {"difference": float(f"{apart:.1e}"), "tolerance": float(f"{tolerance:.2g}")}
    return {"verdict": "equal" if apart <= tolerance else "different", **row}


_BY_TRIAL = ("Micro-batches would give other", "can't be planned for", "than the least that any plan needs")
"""Parts of refusals that come of trying the batch."""


def _needs_the_batch(words: str) -> bool:
    return any(part in words for part in _BY_TRIAL)


def _expected(drawn: Drawn, watch: Adapters, double: bool = False) -> Trained:
    """The run that the techniques promise, without any of them; in float64 to see what rounding makes of it."""
    module = modules.build(drawn.name)
    if watch.found:
        ByHand(module, watch.found)
    optimizer = drawn.setting.of_kind("optimizer")
    if optimizer is not None and "optimizer" in optimizer.technique.numerics:
        module.make_optimizer = _other(optimizer.name, module)
    loader = modules.loader(drawn.name)
    options = {**drawn.trainer, "precision": "64-true"} if double else drawn.trainer
    return train(module, loader, **options)[0]


def _other(name: str, module: Any) -> Any:
    """Another optimizer at the module's rate and decay, built by hand."""
    group = module.configure_optimizers().param_groups[0]
    rate, decay = group["lr"], group["weight_decay"]
    if name == "adafactor":
        return lambda parameters: torch.optim.Adafactor(parameters, lr=rate, eps=(None, 1e-3), weight_decay=decay)
    return lambda parameters: _Lion(parameters, {"lr": rate, "betas": (0.9, 0.99), "weight_decay": decay})


class _Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                update = (first * moment + (1 - first) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                moment.mul_(second).add_((1 - second) * p.grad)
        return loss


def _job(seed: str) -> dict[str, Any]:
    return examine(int(seed))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave rows that are there as they are")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    rows = {row["seed"]: row for row in read_rows(chosen.output)}
    seeds = chosen.only or range(chosen.number)
    left = [str(seed) for seed in seeds if not (chosen.go_on and seed in rows)]
    for seed, row in each(_job, left, SECONDS, chosen.processes):
        if isinstance(row, Exception):
            row = {
                "seed": int(seed),
                "module": Drawn(int(seed)).name,
                "verdict": "crashed",
                "words": str(row)[:MESSAGE],
            }
        rows[int(seed)] = row
        _show(row)
        kept = [{k: v for k, v in rows[s].items() if k != "seconds"} for s in sorted(rows)]
        command = "python -m benchmarks.techniques_sweep.combinations"
        write(chosen.output, {"command": command, "steps": 3, "tolerances": dict(TOLERANCES), "rows": kept})


def _show(row: dict[str, Any]) -> None:
    print(f"{row['seed']:4} {row['module']:16} {row['verdict']:20} {row.get('difference', '')} "
          f"{', '.join(row.get('techniques', {}))} ({row.get('seconds', '')} s)", flush=True)  # fmt: skip
    if row["verdict"] not in ("equal", "refused"):
        print(f"     {row.get('words', '')[:250]}\n     {row.get('validate', '')}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
