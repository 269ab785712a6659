"""Memory and speed that others publish, beside ours.

Memory is that of `memfit estimate`, a command of its own for each run, without any cache; speed is that of the
planner's time model for the same techniques, batch and devices, by data sheet. Nothing is run on these GPUs. What
compiling saves was chosen by the compiled runs, and nothing else fitted to them. With `--predict`,
memory stays as it was.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.runner import Benchmark, Named, Options, Row, Stage, named
from benchmarks.text import ROOT, table
from benchmarks.training import OwnLoss
from lightning_memfit.device.catalogue import find_device
from lightning_memfit.estimate.architectures import find_architecture
from lightning_memfit.estimate.named_model import make_batch
from lightning_memfit.estimate.target import Target, named_target
from lightning_memfit.memory import GIB
from lightning_memfit.models import CausalLM
from lightning_memfit.models.architecture import resolve_config
from lightning_memfit.planner.rates import Rates, rates_of
from lightning_memfit.planner.solve import Solver
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import NUMERICS, Devices, Workload, facts_of, parse_device_count
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

_OPTIMIZER, _PER_MACHINE = "adamw_fused", 8
_PRECISIONS = {"bf16-mixed": "bf16_mixed", "bf16-true": "bf16_true"}

RESULT = "llama31_published.json"


@dataclass(frozen=True)
class Source:
    """Who published figures, where, and on what they were measured."""

    name: str
    url: str
    """The version that was read."""
    date: str
    """Of that version."""
    settings: str
    bandwidth_bytes_per_s: float | None = None
    """Of its devices' memory, where it isn't our catalogue's."""
    network_bytes_per_s: float | None = None
    """Of a machine to others, where it says so."""


@dataclass(frozen=True)
class Run:
    """One published row, and the same training in our names."""

    source: Source
    where: str
    """The row in the source."""
    gib: float | None
    """None where memory is of no interest here."""
    per_s: float
    """Tokens, or images, of one device."""
    device: str
    """As `--device` takes it."""
    sequence_length: int | None
    """None for images."""
    precision: str
    techniques: Mapping[str, Mapping[str, Any]]
    """Options by name."""
    strategy: str = ""
    model: str = "llama-3.1-8b"
    """As `--model` takes it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What differs from that model."""
    micro_batch: int = 2
    why_not: str = ""
    """Why the speed is none that this training can have."""

    def options(self) -> list[str]:
        """Of `memfit estimate`."""
        techniques = [
            f"--technique={name}" + ":" * bool(given) + ",".join(f"{key}={json.dumps(v)}" for key, v in given.items())
            for name, given in self.techniques.items()
            if name not in _COMPILED  # which changes no estimate
        ]
        return [
            f"--model={self.model}",
            f"--sequence-length={self.sequence_length}",
            f"--micro-batch-size={self.micro_batch}",
            f"--precision={self.precision}",
            f"--optimizer={_OPTIMIZER}",
            f"--device={self.device}",
            *([f"--strategy={self.strategy}"] if self.strategy else []),
            *techniques,
        ]

    def setting(self, devices: Devices) -> Setting:
        """The whole of it, for the planner."""
        setting = Setting(self.micro_batch, world_size=devices.total).choose(_PRECISIONS[self.precision])
        setting = setting.choose("fused_adamw")
        for name, given in self.techniques.items():
            setting = setting.choose(name, **given)
        options = {"num_nodes": devices.machines} if devices.machines > 1 else {}
        return setting.choose(self.strategy, **options) if self.strategy else setting


_TITAN = Source(
    "torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`",
    "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md",
    "2024-12-26",
    "FSDP2 without compilation, local batch 2 of 8192 tokens, selective checkpointing; H100 with 96 GB of HBM2e at 2.4 "
    "TB/s and a limit of 500 W, NVLink, 400 Gbit/s per GPU between hosts; the 90th iteration",
    bandwidth_bytes_per_s=2.4e12,
    network_bytes_per_s=8 * 50e9,
)
_TUNE = Source(
    "torchtune, `README.md`",
    "https://github.com/pytorch/torchtune/blob/30b8519/README.md",
    "2024-09-24",
    "batch 2 of 2048 packed tokens, no accumulation, compiled, mean over an epoch; by the configs of that commit "
    "bfloat16, everything recomputed, loss in chunks, and PagedAdamW8bit that steps in the backward pass, or fused "
    "AdamW on adapters of rank 8",
)
_TUNE_3B = Source(
    "torchtune, `README.md`",
    "https://github.com/pytorch/torchtune/blob/main/README.md",
    "2025",
    "Llama-3.2-3B, batch 2 of 4096 packed tokens, bfloat16, `Peak Memory Active`; all rows but the first are compiled, "
    "and each adds to the one before it, but adapters step after the backward pass. They are of rank 64, beside every "
    "linear layer of a block but `k_proj`, by its configs",
)
_LLM_C = Source(
    "llm.c, discussion 677",
    "https://github.com/karpathy/llm.c/discussions/677",
    "2024-07",
    "GPT-2 1558M in C and CUDA, with kernels fused by hand and a vocabulary of 50,304; here by torch.compile",
)
_AO = Source(
    "torchao, `torchao/optim/README.md`",
    "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md",
    "2025",
    "timm's ViT-H/14 with AdamW under bfloat16 autocast, and ViT-g/14 of 1.1 billion parameters in bfloat16",
)
SOURCES = (_TITAN, _TUNE, _TUNE_3B, _LLM_C, _AO)
_FULL: Mapping[str, Any] = {"activation_checkpointing": {}}
_SELECTIVE: Mapping[str, Any] = {"activation_checkpointing": {"mode": "selective", "keep": ["matmul", "attention"]}}
_COMPILED: Mapping[str, Any] = {"torch_compile": {}}
_PAGED: Mapping[str, Any] = _COMPILED | {"paged_optimizer_8bit": {}, "gradient_release": {}, "chunked_loss": {}}
_ATTENTION, _MLP = ["q_proj", "v_proj", "k_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
_CHUNKED: Mapping[str, Any] = {"chunked_loss": {}}
_LORA: Mapping[str, Any] = _CHUNKED | {"lora": {"rank": 8, "target_modules": _ATTENTION[:2]}}
_QLORA: Mapping[str, Any] = _CHUNKED | {"qlora": {"rank": 8, "target_modules": _ATTENTION + _MLP}}
_TUNED: Mapping[str, Any] = _COMPILED | _CHUNKED
_ZEROED: Mapping[str, Any] = {"zero_grad_after_step": {}}
_RELEASED: Mapping[str, Any] = {"gradient_release": {}}
_OFFLOADED: Mapping[str, Any] = {"activation_checkpointing": {"mode": "offload_inputs"}}
_ADAPTERS: Mapping[str, Any] = {"rank": 64, "target_modules": [_ATTENTION[0], _ATTENTION[1], _ATTENTION[3], *_MLP]}
_GIANT = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "intermediate_size": 6144}
_ABOVE = "recomputing as its config does takes more than the card's peak"


def _tuned(method: str, device: str, gib: float, per_s: float, techniques: Mapping[str, Any], why_not: str = "") -> Run:
    row, card = f"Llama 3.1 8B, {method}, 1x {device}", f"RTX {device}"
    return Run(_TUNE, row, gib, per_s, card, 2048, "bf16-true", techniques, why_not=why_not)


def _small(row: str, gib: float, per_s: float, techniques: Mapping[str, Any]) -> Run:
    return Run(_TUNE_3B, row, gib, per_s, "A100 80GB", 4096, "bf16-true", techniques, model="llama-3.2-3b")


RUNS: dict[str, Run] = {
    f"{ranks} H100, FSDP, 2 x 8192; {words}": Run(
        _TITAN, f"table {table}, FSDP", gib, speed, f"{ranks}x H100 SXM", 8192, "bf16-mixed", techniques, "fsdp2"
    )
    for ranks, table, gib, speed in ((8, 1, 82.4, 5762.0), (128, 3, 67.0, 5605.0))
    for words, techniques in (("all recomputed", _FULL), ("products and attention kept", _SELECTIVE))
} | {
    "1 RTX 4090, full finetune, 2 x 2048; all recomputed": _tuned("Full finetune", "4090", 18.9, 1650, _PAGED | _FULL),
    "1 RTX A6000, full finetune, 2 x 2048; all kept": _tuned("Full finetune", "A6000", 37.4, 2579, _PAGED, _ABOVE),
    "1 RTX 4090, LoRA, 2 x 2048; all recomputed": _tuned("LoRA", "4090", 16.2, 3083, _LORA | _FULL | _COMPILED),
    "1 RTX A6000, LoRA, 2 x 2048; all kept": _tuned("LoRA", "A6000", 30.3, 4699, _LORA | _COMPILED, _ABOVE),
    "1 RTX 4090, QLoRA, 2 x 2048; all recomputed": _tuned("QLoRA", "4090", 7.4, 2413, _QLORA | _FULL | _COMPILED),
} | {
    f"1 A100, Llama-3.2-3B, 2 x 4096; {words}": _small(*published, techniques)
    for words, published, techniques in (
        ("plain", ("Packed Dataset", 60.0, 7075), _ZEROED),
        ("loss in chunks", ("Chunked Cross Entropy", 42.9, 9174), _TUNED | _ZEROED),
        ("all recomputed", ("Activation Checkpointing", 24.9, 7210), _TUNED | _FULL | _ZEROED),
        ("stepping in backward", ("Fuse optimizer step into backward", 23.1, 7309), _TUNED | _FULL | _RELEASED),
        ("inputs in host memory", ("Activation Offloading", 21.8, 7301), _TUNED | _OFFLOADED | _RELEASED),
        ("8-bit states", ("8-bit AdamW", 17.6, 6960), _TUNED | _OFFLOADED | _RELEASED | {"optimizer_8bit": {}}),
        ("LoRA", ("LoRA", 8.5, 8210), _TUNED | _OFFLOADED | _ZEROED | {"lora": _ADAPTERS}),
        ("QLoRA", ("QLoRA", 4.6, 8035), _TUNED | _OFFLOADED | _ZEROED | {"qlora": _ADAPTERS}),
    )
} | {
    "1 H100, GPT-2 XL by llm.c, 16 x 1024": Run(
        _LLM_C, "1558M", None, 46_800, "H100 SXM", 1024, "bf16-mixed", _COMPILED | _CHUNKED, model="gpt2-xl",
        config={"vocab_size": 50_304}, micro_batch=16,
    ),
    "1 RTX 4070 Ti Super, ViT-H/14, batch 8": Run(
        _AO, "ViT-H", None, 41.9, "RTX 4070 Ti Super", None, "bf16-mixed", {}, model="vit-huge", micro_batch=8
    ),
    "1 RTX 4070 Ti Super, ViT-g/14, batch 32; all recomputed": Run(
        _AO, "no offload", None, 32 / 1.27, "RTX 4070 Ti Super", None, "bf16-true", _FULL, model="vit-huge",
        config=_GIANT, micro_batch=32,
    ),
}  # fmt: skip
"""By the words of the table. Recomputing as its configs do, the A6000 would be faster than its peak (see the page)."""


def speed(run: Run, cache: ProfileCache) -> dict[str, Any]:
    """Seconds of a step by what the planner says they are spent on, and tokens or images per second of one device."""
    workload = _workload(run)
    seconds = Solver(TraceStore(workload, cache)).solve_uniform(run.setting(workload.devices)).time.seconds
    spent = {name: round(value, 4) for name, value in seconds.items() if value}
    done = run.micro_batch * (run.sequence_length or 1)
    return {"per_s": float(f"{done / sum(seconds.values()):.4g}"), "step_seconds": spent}


def _workload(run: Run) -> Workload:
    count, name = parse_device_count(run.device)
    devices = Devices(min(count or 1, _PER_MACHINE), -(-(count or 1) // _PER_MACHINE))
    target, architecture = named_target(name), find_architecture(run.model)
    config = {key: value for key, value in architecture.config.items() if "dtype" not in key} | run.config
    module: pl.LightningModule
    if run.sequence_length is None:
        resolved = ViTConfig(**config)
        with torch.device("meta"):  # its trace needs no weights
            module = OwnLoss(ViTForImageClassification(resolved).train())
    else:
        resolved = resolve_config(None, None, {"model_type": architecture.model_type, **config})
        module = CausalLM(config={"model_type": architecture.model_type, **config})
    batch = make_batch(architecture, resolved, 2, run.sequence_length)
    options = StepOptions(run.precision)  # type: ignore[arg-type]
    return Workload(
        module,
        batch,
        options,
        run.micro_batch * devices.total,
        target,
        _rates(target, run.source),
        facts_of(module, target, options),
        allow=frozenset(NUMERICS),
        devices=devices,
        strategies=devices.total > 1,
    )


def _rates(target: Target, source: Source) -> Rates:
    """Rates of a device on hardware as a source describes it."""
    rates, ours = rates_of(target), find_device(target.name).bandwidth_bytes_per_s
    assert ours is not None
    return replace(
        rates,
        bytes_per_s=rates.bytes_per_s * (source.bandwidth_bytes_per_s or ours) / ours,
        network_bytes_per_s=source.network_bytes_per_s or rates.network_bytes_per_s,
    )


def estimate(options: list[str]) -> dict[str, Any]:
    """The estimate, with the seconds that the command took."""
    command = [sys.executable, "-m", "lightning_memfit.cli", "estimate", "--json", "--no-cache", *options]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return {"peak": json.loads(done.stdout)["peak"], "seconds": round(time.monotonic() - started, 1)}


def text(document: dict[str, Any]) -> str:
    """A row for each run."""
    rows, lines = {row["name"]: row for row in document["rows"]}, []
    for name, run in RUNS.items():
        row, memory = rows[name], [""] * 3
        if run.gib is not None:
            reserved, allocated = (row["peak"][f"{key}_bytes"] / GIB for key in ("reserved", "allocated"))
            memory = [f"{run.gib} GiB", f"{reserved:.1f} GiB", f"{allocated:.1f} GiB"]
        why_not = f"; published: {run.why_not}" if run.why_not else ""
        error = row["per_s"] / run.per_s - 1
        lines.append([name, *memory, f"{run.per_s:,.4g}", f"{row['per_s']:,.4g} ({error:+.0%}{why_not})"])
    speeds = "tokens or images/s of a device, published"
    errors = [abs(rows[name]["per_s"] / run.per_s - 1) for name, run in RUNS.items() if not run.why_not]
    return "\n".join(
        [
            table(["run", "published", "reserved, predicted", "allocated", speeds, "predicted"], lines),
            "",
            f"Speeds are {statistics.median(errors):.0%} off in the median, {max(errors):.0%} at most.",
            "",
            *(f"- {source.name} ({source.date}, <{source.url}>): {source.settings}." for source in SOURCES),
        ]
    )


def _speed(case: Named, options: Options, row: Row) -> Row:
    run = RUNS[case.name]
    published = {**asdict(run), "source": run.source.name}
    return {"published": published, **speed(run, ProfileCache(options.folder))}


def _memory(case: Named, options: Options, row: Row) -> Row:
    run = RUNS[case.name]
    return {} if run.gib is None else estimate(run.options())


BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(RUNS),
    (Stage(_speed), Stage(_memory)),
    lambda rows, options: {"sources": list(map(asdict, SOURCES)), "rows": rows},
    lambda row: f"{row['per_s']}/s ({row['per_s'] / row['published']['per_s'] - 1:+.0%})",
)
