"""Memory and time of every technique of the registry on one small model, on the CPU.

A GPT-2 of four blocks trains on bytes of Python's standard library, from the same weights for each technique. Memory is
that of live tensors in the second of two steps, predicted from a trace and measured. Time is processor time of a step,
the median of the last 20 of 28, which other programs on the machine disturb little.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.runner import Benchmark, Named, Options, Row, Stage, read
from benchmarks.text import ROOT, insert, table
from benchmarks.training import Clock, trainer_of
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.memory import MIB
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import Technique

RESULT = "techniques_cpu.json"
BATCH, LENGTH, STEPS, TIMED = 4, 128, 28, 20
CPU = Facts(device="cpu", num_blocks=4)
_PLAIN = "plain"


class Bytes(pl.LightningModule):
    """A small GPT-2 over bytes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=192, n_layer=4, n_head=4, use_cache=False,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches() -> DataLoader[Any]:
    """The standard library's largest modules as rows of bytes."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = data[: STEPS * BATCH * LENGTH].view(-1, LENGTH)
    return DataLoader(rows, batch_size=BATCH)


def cases(options: Options) -> list[Named]:
    """The plain run, every technique, and two further modes of checkpointing."""
    plain, checkpointing = Setting(), "activation_checkpointing"
    alone = (Setting(1, BATCH) if one.kind == "batching" else plain.choose(one.name) for one in TECHNIQUES)
    found = [Named(_PLAIN, plain), *(Named(one.name, setting) for one, setting in zip(TECHNIQUES, alone, strict=True))]
    selective = plain.choose(checkpointing, mode="selective", keep=["matmul", "attention"])
    found.append(Named(f"{checkpointing}, selective", selective))
    return [*found, Named(f"{checkpointing}, every 2", plain.choose(checkpointing, mode="every", every=2))]


def measure(case: Named, options: Options, row: Row) -> Row:
    """Time, and memory where the technique changes what a trace could see."""
    setting, clock = case.of, Clock()
    if refused := setting.validate(CPU):
        return {"refused": refused[0]}
    trainer_of(*setting.callbacks(), clock, max_steps=STEPS, precision=setting.precision).fit(Bytes(), batches())
    found: Row = {"cpu_s_per_step": statistics.median(clock.seconds[-TIMED:])}
    if all(choice.technique.traced for choice in setting.chosen):
        size = setting.micro_batch_size or BATCH
        batch = next(iter(batches()))[:size]
        given = {"options": setting.step_options(), "callbacks": setting.traced_callbacks()}
        traced = profile_module(Bytes(), batch, emulation=Emulation(device="cpu"), any_micro_batch=False, **given)
        measured = measure_step(Bytes(), batch, **given)
        found["predicted_bytes"] = predict_peak_bytes(traced, size)
        found["measured_bytes"] = predict_peak_bytes(measured, size)
    return found


BENCHMARK = Benchmark(
    RESULT,
    cases,
    (Stage(measure),),
    lambda rows, options: {"batch": [BATCH, LENGTH], "steps": STEPS, "rows": rows},
)


# --- pages ------------------------------------------------------------------------------------------------------------


FOLDER = ROOT / "docs" / "techniques"
_IN_README = {
    "optimizer_8bit": ("optimizer states: 8 to 2 bytes per parameter", "lossy; update of quantized states"),
    "bf16_stochastic_rounding": ("weights and gradients: 8 to 4 bytes", "lossy; random bits in each update"),
    "host_master_weights": ("12 of 16 bytes, kept in host memory", "lossy (bf16); transfers in each step"),
    "gradient_release": ("all gradients but one", "exact; clips by value only"),
    "activation_checkpointing": ("activations of all blocks but one", "exact; a second forward pass"),
    "chunked_loss": ("logits: 6 bytes per token and vocabulary entry", "exact; more kernels"),
    "lora": ("gradients and states of frozen weights", "trains adapters only"),
    "micro_batching": ("activations: a part of the batch at a time", "exact; smaller kernels"),
}
"""What the README's techniques save and cost, in words."""


def readme(document: dict[str, Any]) -> str:
    """The README's table: measured are live bytes and processor time of a step, as parts of the plain step's."""
    rows, lines = {row["name"]: row for row in document["rows"]}, []
    for name, words in _IN_README.items():
        shares = (rows[name][key] / rows[_PLAIN][key] for key in ("measured_bytes", "cpu_s_per_step"))
        lines.append([f"`{name}`", *words, *(f"{share:.2f}" for share in shares)])
    return table(["technique", "saves", "costs", "memory", "time"], lines, right=2)


def pages() -> dict[Path, str]:
    """Every page of a technique, and the table of all, as they should be."""
    found = {}
    for path in sorted({page_of(technique) for technique in TECHNIQUES}):
        own = [technique for technique in TECHNIQUES if page_of(technique) == path]
        found[path] = insert(path.read_text(), "use", use(own))
    every = FOLDER / "README.md"
    return found | {every: insert(every.read_text(), "techniques", overview(read(RESULT)))}


def page_of(technique: Technique) -> Path:
    """The page that describes a technique."""
    return FOLDER / f"{technique.page or technique.name}.md"


def overview(document: dict[str, Any]) -> str:
    """Table over the registry, with peak and time as shares of the plain run's where they were measured."""
    rows, lines = {row["name"]: row for row in document["rows"]}, []
    for one in TECHNIQUES:
        row = rows.get(one.name, {})
        shares = [
            f"{100 * row[key] / rows[_PLAIN][key]:.0f} %" if key in row else ""
            for key in ("measured_bytes", "cpu_s_per_step")
        ]
        link = f"[`{one.name}`]({page_of(one).name})"
        lines.append([link, one.kind, one.summary, ", ".join(sorted(one.numerics)), one.package, *shares])
    batch, length = document["batch"]
    return (
        table(["technique", "decides", "what it does", "numbers", "needs", "peak", "step"], lines)
        + "\n\n`peak` and `step` are the peak of live tensors and the processor time of a step, against the plain "
        f"run's {rows[_PLAIN]['measured_bytes'] / MIB:.1f} MiB and 100 %: GPT-2 of four blocks, {batch} x {length} "
        f"bytes of text, fp32 AdamW, {document['steps']} steps on one CPU core (torch "
        f"{document['versions']['torch']}; `python -m benchmarks techniques`)."
    )


def use(techniques: list[Technique]) -> str:
    """What to write in Python: a block for one technique, a row each for several."""
    if len(techniques) == 1:
        imports = [f"from lightning_memfit import {spec.name}" for spec in techniques[0].callbacks]
        return "\n".join(["```python", *imports, "", f"Trainer({_arguments(techniques[0])})", "```"])
    return table(["`--with`", "in Python"], [[f"`{one.name}`", f"`Trainer({_arguments(one)})`"] for one in techniques])


def _arguments(technique: Technique) -> str:
    is_plugin = any(spec.is_precision for spec in technique.callbacks)
    arguments = [] if is_plugin else [f"{name}={value!r}" for name, value in technique.trainer.items()]
    calls = [
        f"{spec.name}({', '.join(f'{name}={value!r}' for name, value in spec.init_args.items())})"
        for spec in technique.callbacks
    ]
    if calls:
        arguments.append(f"{'plugins' if is_plugin else 'callbacks'}=[{', '.join(calls)}]")
    return ", ".join(arguments).replace("'", '"')
