"""`Facts` about a module and its device, and `Run`: facts and choices together, which the rules of techniques read.

Plain data, so that a rule says the same of a plan that nobody runs yet and of a Trainer about to begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memfit.memory.kind import CUDA, DeviceKind


@dataclass(frozen=True)
class Facts:
    """What no choice of technique changes. None where it is not known before the model is built."""

    device: str = CUDA
    """Device type."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    automatic_optimization: bool = True
    overridden: frozenset[str] = frozenset()
    """Hooks of LightningModule that the module defines itself."""
    optimizers: tuple[str, ...] = ()
    """Class names of the module's own optimizers; empty where they are not known."""
    num_blocks: int | None = None
    """Repeated blocks found."""
    sequential_blocks: bool | None = None
    """Whether they run one after the other in an nn.Sequential."""
    causal_lm: bool | None = None
    """Whether a Hugging Face causal language model with a linear head computes the loss."""
    hugging_face: bool | None = None
    """Whether there is a `transformers.PreTrainedModel`."""
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    loader: str = "DataLoader"
    """Class name of the training loader."""
    compiler: bool | None = None
    """Whether the machine has what torch.compile needs."""

    @property
    def device_kind(self) -> DeviceKind:
        """What the type of the device can do."""
        return DeviceKind.of(self.device)


@dataclass(frozen=True)
class Run:
    """A run as far as techniques care: of a `Setting`, or of a Trainer (`read_facts.run_of`)."""

    facts: Facts = field(default_factory=Facts)
    precision: str = "32-true"
    """Lightning's name."""
    accumulate_grad_batches: int = 1
    """Backward passes per optimizer step, by whichever loop."""
    strategy: str = "SingleDeviceStrategy"
    """Class name."""
    zero_3: bool = False
    """Whether DeepSpeed puts weights away, and gathers them only while their own module runs."""
    world_size: int = 1
    callbacks: tuple[str, ...] = ()
    """Class names of the techniques' callbacks, in order."""

    def has(self, name: str) -> bool:
        """Whether a callback of this class takes part."""
        return name in self.callbacks
