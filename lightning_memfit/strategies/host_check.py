"""Check, before the engine is built, that a ZeRO run that offloads or runs on the CPU will find enough host memory."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memfit.device.host import probe_host
from lightning_memfit.estimate.deepspeed import DeepSpeedRun, OffloadTarget, deepspeed_memory
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.nvme.preflight import host_memory, sentence

_FIX = "use more machines, a smaller `bucket_size`, keep states on disk (`memfit_zero_infinity`), or end other programs"


def require_host_memory(
    model: nn.Module,
    optimizer: Optimizer | None,
    zero: dict[str, Any],
    precision: str,
    world_size: int,
    ranks: int,
    on_cpu: bool,
    accumulates: bool = False,
) -> None:
    """Refuse a run that would swap or be killed when its optimizer first steps.

    This covers only torch's Adam and AdamW, whose states are known.

    Raises:
        RuntimeError: If there is too little; it gives what is needed, what is free, and the fix.
    """
    sections = [zero.get(name, {}) for name in ("offload_optimizer", "offload_param")]
    places: list[OffloadTarget] = [section.get("device", "none") for section in sections]
    known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not known or "nvme" in places or not (on_cpu or "cpu" in places):
        return
    run = DeepSpeedRun(
        parameter_table(model),
        zero["stage"],
        world_size,
        2 if "16" in precision else 4,
        offload_optimizer=places[0],
        offload_parameters=places[1],
        bucket_size=int(zero["reduce_bucket_size"]),
        sub_group_size=int(zero.get("sub_group_size", 0)),
        pin_memory=any(section.get("pin_memory") for section in sections),
        accumulates=accumulates,
        on_cpu=on_cpu,
        is_fp16=precision.startswith("16"),
    )
    free = probe_host().available_bytes + ranks * _held(model)
    finding = host_memory(deepspeed_memory(run).once_built(), ranks, free, _FIX)
    if finding.level != "ok":
        raise RuntimeError(f"This run would not fit in host memory: {sentence(finding)}")


def _held(model: nn.Module) -> int:
    """Bytes of host memory that weights take now: whole weights, or with stage 3 this rank's shares."""
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type == "cpu")
