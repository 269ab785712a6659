"""lightning-memfit: give it any LightningModule and any machine, and it makes training fit.

Public names are imported on first use, so that `import lightning_memfit` costs nothing. Type checkers read the imports
below instead, and so know every argument.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_memfit import one_lightning

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lightning_memfit.adapters.checkpoint import merged_state_dict as merged_state_dict
    from lightning_memfit.bench.run_timeline import RunTimeline as RunTimeline
    from lightning_memfit.checkpointing.check import InexactRecomputationError as InexactRecomputationError
    from lightning_memfit.data import ChatData as ChatData
    from lightning_memfit.data import PairData as PairData
    from lightning_memfit.data import RandomTensors as RandomTensors
    from lightning_memfit.data import RandomTokens as RandomTokens
    from lightning_memfit.data import StandardLibraryChats as StandardLibraryChats
    from lightning_memfit.data import StandardLibraryPairs as StandardLibraryPairs
    from lightning_memfit.data import StandardLibraryText as StandardLibraryText
    from lightning_memfit.data import TextData as TextData
    from lightning_memfit.device.catalogue import find_device as find_device
    from lightning_memfit.device.limit import MemoryLimit as MemoryLimit
    from lightning_memfit.device.limit import SimulatedDevice as SimulatedDevice
    from lightning_memfit.estimate.estimate import estimate_step as estimate_step
    from lightning_memfit.fitting.auto import MemFit as MemFit
    from lightning_memfit.fitting.recovery.oom_report import OutOfMemoryReport as OutOfMemoryReport
    from lightning_memfit.fitting.size.prediction import MemoryPrediction as MemoryPrediction
    from lightning_memfit.fitting.step.callback import MicroBatching as MicroBatching
    from lightning_memfit.measure.data_wait import DataWaitMonitor as DataWaitMonitor
    from lightning_memfit.measure.monitor import MemoryMonitor as MemoryMonitor
    from lightning_memfit.measure.summary import RunSummary as RunSummary
    from lightning_memfit.measure.utilization import FlopsMonitor as FlopsMonitor
    from lightning_memfit.memory import MemoryBreakdown as MemoryBreakdown
    from lightning_memfit.memory import format_bytes as format_bytes
    from lightning_memfit.memory import parse_bytes as parse_bytes
    from lightning_memfit.models import CausalLM as CausalLM
    from lightning_memfit.models import Seq2SeqLM as Seq2SeqLM
    from lightning_memfit.models import SequenceClassifier as SequenceClassifier
    from lightning_memfit.planner.feedback import PlanFeedback as PlanFeedback
    from lightning_memfit.profile.build import measure_step as measure_step
    from lightning_memfit.profile.build import profile_module as profile_module
    from lightning_memfit.reliability.non_finite import NonFiniteGuard as NonFiniteGuard
    from lightning_memfit.reliability.preemption import Preemption as Preemption
    from lightning_memfit.reliability.whole_steps import WholeSteps as WholeSteps
    from lightning_memfit.strategies import AtomicCheckpointIO as AtomicCheckpointIO
    from lightning_memfit.strategies import DataParallelStrategy as DataParallelStrategy
    from lightning_memfit.strategies import FullyShardedStrategy as FullyShardedStrategy
    from lightning_memfit.strategies import ZeroInfinityStrategy as ZeroInfinityStrategy
    from lightning_memfit.strategies import ZeroStrategy as ZeroStrategy
    from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from lightning_memfit.techniques.attention import AttentionKernel as AttentionKernel
    from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding as StochasticRounding
    from lightning_memfit.techniques.chunked_loss import ChunkedLoss as ChunkedLoss
    from lightning_memfit.techniques.core.setting import Setting as Setting
    from lightning_memfit.techniques.data_loading import DataLoading as DataLoading
    from lightning_memfit.techniques.gradient_release import GradientRelease as GradientRelease
    from lightning_memfit.techniques.host_master_weights import HostMasterWeights as HostMasterWeights
    from lightning_memfit.techniques.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from lightning_memfit.techniques.lora import Lora as Lora
    from lightning_memfit.techniques.optimizer import ReplaceOptimizer as ReplaceOptimizer
    from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit as Optimizer8bit
    from lightning_memfit.techniques.quantized_weights import QuantizedWeights as QuantizedWeights
    from lightning_memfit.techniques.tf32 import TF32 as TF32
    from lightning_memfit.techniques.tiled_mlp import TiledMLP as TiledMLP
    from lightning_memfit.techniques.torch_compile import TorchCompile as TorchCompile
    from lightning_memfit.techniques.zero_grad_after_step import ZeroGradAfterStep as ZeroGradAfterStep

one_lightning.unite()

# Name and the module it is imported from: what the imports above say, which a test compares.
_PUBLIC = {
    "ActivationCheckpointing": "lightning_memfit.techniques.activation_checkpointing",
    "AtomicCheckpointIO": "lightning_memfit.strategies",
    "AttentionKernel": "lightning_memfit.techniques.attention",
    "CausalLM": "lightning_memfit.models",
    "ChatData": "lightning_memfit.data",
    "ChunkedLoss": "lightning_memfit.techniques.chunked_loss",
    "DataLoading": "lightning_memfit.techniques.data_loading",
    "DataParallelStrategy": "lightning_memfit.strategies",
    "DataWaitMonitor": "lightning_memfit.measure.data_wait",
    "FlopsMonitor": "lightning_memfit.measure.utilization",
    "FullyShardedStrategy": "lightning_memfit.strategies",
    "GradientRelease": "lightning_memfit.techniques.gradient_release",
    "HostMasterWeights": "lightning_memfit.techniques.host_master_weights",
    "InexactRecomputationError": "lightning_memfit.checkpointing.check",
    "Lora": "lightning_memfit.techniques.lora",
    "MemFit": "lightning_memfit.fitting.auto",
    "MemoryBreakdown": "lightning_memfit.memory",
    "MemoryLimit": "lightning_memfit.device.limit",
    "MemoryMonitor": "lightning_memfit.measure.monitor",
    "MemoryPrediction": "lightning_memfit.fitting.size.prediction",
    "MicroBatching": "lightning_memfit.fitting.step.callback",
    "NonFiniteGuard": "lightning_memfit.reliability.non_finite",
    "Optimizer8bit": "lightning_memfit.techniques.optimizer_8bit",
    "OutOfMemoryReport": "lightning_memfit.fitting.recovery.oom_report",
    "PairData": "lightning_memfit.data",
    "PlanFeedback": "lightning_memfit.planner.feedback",
    "Preemption": "lightning_memfit.reliability.preemption",
    "QuantizedWeights": "lightning_memfit.techniques.quantized_weights",
    "RandomTensors": "lightning_memfit.data",
    "RandomTokens": "lightning_memfit.data",
    "ReplaceOptimizer": "lightning_memfit.techniques.optimizer",
    "RunSummary": "lightning_memfit.measure.summary",
    "RunTimeline": "lightning_memfit.bench.run_timeline",
    "Seq2SeqLM": "lightning_memfit.models",
    "SequenceClassifier": "lightning_memfit.models",
    "Setting": "lightning_memfit.techniques.core.setting",
    "SimulatedDevice": "lightning_memfit.device.limit",
    "StandardLibraryChats": "lightning_memfit.data",
    "StandardLibraryPairs": "lightning_memfit.data",
    "StandardLibraryText": "lightning_memfit.data",
    "StochasticRounding": "lightning_memfit.techniques.bf16_stochastic_rounding",
    "TF32": "lightning_memfit.techniques.tf32",
    "TextData": "lightning_memfit.data",
    "TiledMLP": "lightning_memfit.techniques.tiled_mlp",
    "TorchCompile": "lightning_memfit.techniques.torch_compile",
    "WholeSteps": "lightning_memfit.reliability.whole_steps",
    "ZeroGradAfterStep": "lightning_memfit.techniques.zero_grad_after_step",
    "ZeroInfinityStrategy": "lightning_memfit.strategies",
    "ZeroStrategy": "lightning_memfit.strategies",
    "estimate_step": "lightning_memfit.estimate.estimate",
    "find_device": "lightning_memfit.device.catalogue",
    "format_bytes": "lightning_memfit.memory",
    "linear_cross_entropy": "lightning_memfit.techniques.linear_cross_entropy",
    "measure_step": "lightning_memfit.profile.build",
    "merged_state_dict": "lightning_memfit.adapters.checkpoint",
    "parse_bytes": "lightning_memfit.memory",
    "profile_module": "lightning_memfit.profile.build",
}

__all__ = ["__version__", *_PUBLIC]

if not TYPE_CHECKING:  # a type checker would take every name that it doesn't know for `object`

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            names = ", ".join(_PUBLIC)
            raise AttributeError(f"module 'lightning_memfit' has no attribute {name!r}. Public names: {names}.")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
