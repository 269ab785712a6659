"""Measure every technique on the CPU: `python -m benchmarks.techniques.run [--only NAME ...]`.

A GPT-2 of four blocks trains on bytes of Python's standard library, from the same weights for each technique. Memory is
that of live tensors in the second of two steps, predicted from a trace and measured. Time is processor time of a step,
the median of the last 20 of 28, which other programs on the machine disturb little.
"""

import argparse
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.record import trainer_of, write
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.registry import TECHNIQUES
from lightning_memfit.techniques.core.setting import Setting

RESULTS = Path(__file__).parents[1] / "results" / "techniques_cpu.json"
BATCH, LENGTH, STEPS = 4, 128, 28
CPU = Facts(device="cpu", num_blocks=4)


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
        self.times: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.process_time())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches() -> DataLoader[Any]:
    """The standard library's largest modules as rows of bytes."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = data[: STEPS * BATCH * LENGTH].view(-1, LENGTH)
    return DataLoader(rows, batch_size=BATCH)


def measure(setting: Setting) -> dict[str, Any]:
    """Figures of one setting."""
    module = Bytes()
    trainer_of(*setting.callbacks(), max_steps=STEPS, precision=setting.precision).fit(module, batches())
    steps = sorted(after - before for before, after in zip(module.times[-21:-1], module.times[-20:], strict=True))
    return {**memory(setting), "cpu_s_per_step": steps[len(steps) // 2]}


def memory(setting: Setting) -> dict[str, int]:
    """Predicted and measured peak; nothing where the technique changes none that a trace could see."""
    if not all(choice.technique.traced for choice in setting.chosen):
        return {}
    size = setting.micro_batch_size or BATCH
    batch = next(iter(batches()))[:size]
    options = {"options": setting.step_options(), "callbacks": setting.traced_callbacks()}
    traced = profile_module(Bytes(), batch, emulation=Emulation(device="cpu"), any_micro_batch=False, **options)
    measured = measure_step(Bytes(), batch, **options)
    return {
        "predicted_bytes": predict_peak_bytes(traced, size),
        "measured_bytes": predict_peak_bytes(measured, size),
    }


def settings() -> dict[str, Setting]:
    """What is measured, by name; without a name the plain run."""
    found = {"plain": Setting()}
    for technique in TECHNIQUES:
        split = technique.kind == "batching"
        found[technique.name] = Setting(1, BATCH) if split else Setting().choose(technique.name)
    found["activation_checkpointing, selective"] = Setting().choose(
        "activation_checkpointing", mode="selective", keep=["matmul", "attention"]
    )
    found["activation_checkpointing, every 2"] = Setting().choose("activation_checkpointing", mode="every", every=2)
    return found


def main() -> None:
    """Measure, and write what was measured over what is known of the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None)
    only = parser.parse_args().only
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]} if only and RESULTS.exists() else {}
    for name, setting in settings().items():
        if only and name not in only:
            continue
        refused = setting.validate(CPU)
        rows[name] = {"name": name, "refused": refused[0]} if refused else {"name": name, **measure(setting)}
        print(json.dumps(rows[name]), flush=True)
    ordered = [rows[name] for name in settings() if name in rows]
    command = "python -m benchmarks.techniques.run"  # of all rows, whichever were measured last
    write(RESULTS, {"command": command, "batch": [BATCH, LENGTH], "steps": STEPS, "rows": ordered})


if __name__ == "__main__":
    main()
