"""lightning-memfit: give it any LightningModule and any machine, and it makes training fit.

Public names are imported on first use, so that `import lightning_memfit` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ActivationCheckpointing": "lightning_memfit.techniques.activation_checkpointing",
    "AttentionKernel": "lightning_memfit.techniques.attention",
    "CausalLM": "lightning_memfit.models",
    "ChunkedLoss": "lightning_memfit.techniques.chunked_loss",
    "DataLoading": "lightning_memfit.techniques.data_loading",
    "DataWaitMonitor": "lightning_memfit.measure.data_wait",
    "FlopsMonitor": "lightning_memfit.measure.utilization",
    "GradientRelease": "lightning_memfit.techniques.gradient_release",
    "HostMasterWeights": "lightning_memfit.techniques.host_master_weights",
    "MemFit": "lightning_memfit.fitting.auto",
    "MemoryBreakdown": "lightning_memfit.memory",
    "MemoryLimit": "lightning_memfit.device.limit",
    "MemoryMonitor": "lightning_memfit.measure.monitor",
    "MemoryPrediction": "lightning_memfit.fitting.size.prediction",
    "MicroBatching": "lightning_memfit.fitting.step.callback",
    "Optimizer8bit": "lightning_memfit.techniques.optimizer_8bit",
    "OutOfMemoryReport": "lightning_memfit.fitting.recovery.oom_report",
    "ReplaceOptimizer": "lightning_memfit.techniques.optimizer",
    "Setting": "lightning_memfit.techniques.core.setting",
    "PairData": "lightning_memfit.data",
    "RandomTokens": "lightning_memfit.data",
    "RunSummary": "lightning_memfit.measure.summary",
    "RunTimeline": "lightning_memfit.bench.run_timeline",
    "Seq2SeqLM": "lightning_memfit.models",
    "SequenceClassifier": "lightning_memfit.models",
    "SimulatedDevice": "lightning_memfit.device.limit",
    "StandardLibraryText": "lightning_memfit.data",
    "StochasticRounding": "lightning_memfit.techniques.bf16_stochastic_rounding",
    "TF32": "lightning_memfit.techniques.tf32",
    "TextData": "lightning_memfit.data",
    "TorchCompile": "lightning_memfit.techniques.torch_compile",
    "ZeroGradAfterStep": "lightning_memfit.techniques.zero_grad_after_step",
    "ZeroStrategy": "lightning_memfit.strategies",
    "estimate_step": "lightning_memfit.estimate.estimate",
    "find_device": "lightning_memfit.device.catalogue",
    "format_bytes": "lightning_memfit.memory",
    "measure_step": "lightning_memfit.profile.build",
    "parse_bytes": "lightning_memfit.memory",
    "profile_module": "lightning_memfit.profile.build",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        names = ", ".join(_PUBLIC)
        raise AttributeError(f"module 'lightning_memfit' has no attribute {name!r}. Public names: {names}.")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
