"""Random combinations of techniques with random options, on six modules of different kinds.

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

import random
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.runner import Benchmark, Options, Stage, named
from benchmarks.techniques_sweep import modules
from benchmarks.techniques_sweep.adapters import Adapters, ByHand
from benchmarks.techniques_sweep.runs import Trained, of_losses, train, was_refused
from benchmarks.text import by_words, table
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.core.precision import trainer_options
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import KINDS, TOLERANCES

RESULT = "techniques_combinations.json"
NUMBER, SECONDS, MESSAGE = 300, 240.0, 400

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
        self.name = draw.choice(list(modules.MODULES))
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
        return [MemoryLimit("1GiB")] if self.limited else []

    def tolerance(self) -> float:
        return sum(TOLERANCES[one] for one in self.setting.numerics) or TOLERANCES["exact"]


def examine(seed: int) -> dict[str, Any]:
    """The row of one seed."""
    started = time.perf_counter()
    drawn = Drawn(seed)
    row: dict[str, Any] = {
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


# --- the page ---------------------------------------------------------------------------------------------------------


def text(document: dict[str, Any]) -> str:
    """How often each verdict was given, by technique, the tolerances, and the words of what isn't equal."""
    rows = document["rows"]
    not_equal = [row for row in rows if row["verdict"] != "equal"]
    counts = Counter(row["verdict"] for row in rows)
    tolerances = ", ".join(f"`{name}` {value:g}" for name, value in document["tolerances"].items())
    lines = []
    for name in sorted({name for row in rows for name in row.get("techniques", ())}):
        own = [row for row in rows if name in row.get("techniques", ())]
        of_own = Counter(row["verdict"] for row in own)
        shares = [row["difference"] / row["tolerance"] for row in own if row["verdict"] == "equal"]
        cells = [str(of_own[verdict]) for verdict in counts]
        lines.append([f"`{name}`", *cells, f"{max(shares):.0%}" if shares else ""])
    return "\n".join(
        [
            f"{len(rows)} combinations: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}. "
            f"Tolerances: {tolerances}.",
            "",
            table(["technique", *counts, "largest difference, of its tolerance"], lines),
            "",
            "**Not equal**",
            "",
            *by_words(((row["verdict"], row["words"].partition(": ")[2], "") for row in not_equal), counted=True),
        ]
    )


def _figures(rows: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    kept = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    return {"steps": 3, "tolerances": dict(TOLERANCES), "rows": kept}


def _say(row: dict[str, Any]) -> str:
    words = f"{row.get('words', '')[:250]} {row.get('validate', '')}" if row["verdict"] != "equal" else ""
    return f"{row['module']}, {', '.join(row['techniques'])}: {row['verdict']} {row.get('difference', '')} {words}"


BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(map(str, range(NUMBER))),
    (Stage(lambda case, options, row: examine(int(case.name)), timed=False),),
    _figures,
    _say,
    seconds=SECONDS,
)
