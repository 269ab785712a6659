"""`OPTIMIZERS`: one record for every optimizer that is known by name.

Estimates of its states and its time, `ReplaceOptimizer`, `Optimizer8bit` and its technique are derived from it. To add
an optimizer, add its record here (docs/guides/how_to_add.md). Records are data: nothing is imported before `load`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from lightning_memfit.memory.parameters import ParameterInfo

_MIN_QUANTIZED = 4096
"""Tensors with fewer elements keep 32-bit states in bitsandbytes and torchao."""

_MAP_BYTES = 256 * 4
"""Table of the 256 values that 8-bit codes represent: one per state and optimizer, shared by all tensors."""


@dataclass(frozen=True)
class StateLayout:
    """States that an optimizer keeps per trained parameter; exact for torch's and bitsandbytes' optimizers."""

    num_states: int
    """State tensors of the parameter's shape."""
    bits: int = 32
    """Bits per element of large tensors' states."""
    scale_block: int = 0
    """Elements per fp32 scale; 0 without scales."""
    follows_parameter: bool = False
    """Whether states have the parameter's dtype, as in torch's own optimizers; otherwise they are fp32."""
    factored: bool = False
    """Whether the second moment is kept as row and column means (Adafactor, Shazeer & Stern 2018; torch's form)."""
    paged: bool = False
    """Whether states are in unified memory, which the driver moves between host and device."""
    scratch_copies: int | None = 0
    """Copies of all trained weights that a step on CUDA needs in addition to the states (`_foreach_` kernels); None if
    only a trace can tell."""

    def tensor_bytes(self, parameter: ParameterInfo, keep_32bit: bool = False) -> list[int]:
        """Bytes of every state tensor of one trained parameter. Step counts, which are on the host, are left out.

        Raises:
            ValueError: If the states are factored and the parameter has no shape.
        """
        n, itemsize = parameter.numel, parameter.itemsize if self.follows_parameter else 4
        if self.factored and parameter.dims >= 2:
            if not parameter.shape:
                raise ValueError(f"Factored states follow from the shape of {parameter.name}, which isn't known.")
            rows, columns = parameter.shape[-2:]
            return [itemsize * n // columns, itemsize * n // rows]
        if self.bits == 32 or n < _MIN_QUANTIZED or keep_32bit:
            return [itemsize * n] * (1 if self.factored else self.num_states)
        return [-(-n * self.bits // 8), -(-n // self.scale_block) * 4] * self.num_states

    def total_bytes(
        self, parameters: Iterable[ParameterInfo], rounding_bytes: int = 1, keep_32bit: Collection[str] = ()
    ) -> int:
        """Bytes of state of all trainable parameters, tied ones once."""
        sizes = [
            size
            for parameter in parameters
            if parameter.trainable and not parameter.shared_with
            for size in self.tensor_bytes(parameter, parameter.name in keep_32bit)
        ]
        maps = _MAP_BYTES * self.num_states if self.bits == 8 and sizes else 0
        return sum(-(-size // rounding_bytes) * rounding_bytes for size in sizes) + maps

    def bytes_per_parameter(self, itemsize: int = 4) -> float:
        """Bytes of state per parameter of a large tensor.

        Raises:
            ValueError: If it depends on shapes.
        """
        if self.factored:
            raise ValueError("Factored states have no fixed bytes per parameter: use `total_bytes`.")
        if self.bits == 32:
            return float(self.num_states * (itemsize if self.follows_parameter else 4))
        return self.num_states * (self.bits / 8 + 4 / self.scale_block)


@dataclass(frozen=True)
class EightBitForm:
    """How a class is converted to bitsandbytes' `<Class>8bit`, which has 8-bit states."""

    required: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters that must have this value, because bitsandbytes knows no other."""
    betas: tuple[str, ...] = ()
    """Hyper-parameters that bitsandbytes stores together as `betas`."""
    paged: bool = True
    """Whether there is also a paged form."""


@dataclass(frozen=True)
class OptimizerClass:
    """A class of optimizers, and the meaning of its hyper-parameters.

    A hyper-parameter carries over to another class if it has the same meaning there, whatever its name.
    """

    path: str
    """Dotted path of the class."""
    meanings: Mapping[str, str]
    """Meaning of every hyper-parameter but `lr`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that make the class keep to the groups: their learning rate, the kind of decay that they have."""
    settings: frozenset[str] = frozenset()
    """Arguments of the constructor that are not hyper-parameters of groups: kernels, block sizes."""
    note: str = ""
    """Other changes that the class brings."""
    family: str = ""
    """Key of `states.MOMENTS`, if this class computes the same as others of that name."""
    eight_bit: EightBitForm | None = None
    """Form in bitsandbytes with the same formula; None if there is none."""

    @property
    def package(self) -> str:
        """Top-level package that must be installed."""
        return self.path.partition(".")[0]

    @property
    def class_name(self) -> str:
        """Class without its module."""
        return self.path.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Name for `ReplaceOptimizer`, such as `torch.AdamW`."""
        return f"{self.package}.{self.class_name}"

    def load(self) -> type:
        """Import the class."""
        return _load(self.path)


@dataclass(frozen=True)
class Replacement:
    """The technique that exchanges a module's AdamW for an optimizer."""

    technique: str
    """Name of the technique."""
    summary: str
    numerics: frozenset[Literal["exact", "optimizer", "8bit", "4bit"]]
    """Changes of the numbers that must be allowed for it, as in `Technique.numerics`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters without a counterpart in AdamW."""
    drop: tuple[str, ...] = ()
    """Hyper-parameters of AdamW that are given up."""
    then_8bit: bool = False
    """Whether `Optimizer8bit` converts it afterwards."""


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer that is known by name."""

    name: str
    """Short name, for `memfit estimate --optimizer`."""
    cls: OptimizerClass
    """The class that a module's own optimizer is exchanged for."""
    states: StateLayout
    path: str = ""
    """Dotted path of the class that keeps such states if it isn't `cls`: bitsandbytes' 8-bit and paged forms."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor, other than `lr`, that distinguish it from other optimizers of its class."""
    cpu_seconds: float | None = None
    """Seconds per parameter of one step on one core with AVX-512, for optimizers that a plan may choose
    (`benchmarks/optimizer_step`)."""
    cpu_tensor_seconds: float = 0.0
    """Seconds that a step takes for each tensor beyond that."""
    replacement: Replacement | None = None

    @property
    def package(self) -> str:
        """Top-level package that must be installed."""
        return (self.path or self.cls.path).partition(".")[0]

    def make(self, parameters: Any, lr: float) -> Any:
        """Build the optimizer."""
        made: Any = _load(self.path or self.cls.path)
        return made(parameters, lr=lr, **self.cls.fixed, **self.arguments)


def _load(path: str) -> type:
    # Within a trace, the tensors that importing bitsandbytes makes would be fake.
    from torch.utils._python_dispatch import _disable_current_modes

    module, _, name = path.rpartition(".")
    with _disable_current_modes():
        found: type = getattr(import_module(module), name)
    return found


KERNELS = frozenset({"foreach", "fused"})
_ADAM = {"betas": "Adam's moments", "eps": "Adam's epsilon", "amsgrad": "AMSGrad"}
_MAXIMIZE = {"maximize": "maximize"}
_DECOUPLED, _L2 = {"weight_decay": "decoupled decay"}, {"weight_decay": "L2 penalty"}
_SGD = {"momentum": "momentum", "dampening": "dampening", "nesterov": "Nesterov"}
TORCH_SWITCHES = {"maximize": False, "capturable": False, "differentiable": False}
"""Switches of torch's optimizers that bitsandbytes would silently ignore."""

_TORCH_ADAMW = OptimizerClass(
    "torch.optim.adamw.AdamW",
    {**_ADAM, **_DECOUPLED, **_MAXIMIZE},
    settings=KERNELS,
    family="Adam",
    eight_bit=EightBitForm({**TORCH_SWITCHES, "amsgrad": False, "decoupled_weight_decay": True}),
)
_TORCH_ADAM = OptimizerClass(
    "torch.optim.adam.Adam",
    {**_ADAM, **_L2, **_MAXIMIZE},
    settings=KERNELS,
    family="Adam",
    eight_bit=EightBitForm({**TORCH_SWITCHES, "amsgrad": False}),
)
_TORCH_SGD = OptimizerClass(
    "torch.optim.sgd.SGD",
    {**_SGD, **_L2, **_MAXIMIZE},
    settings=KERNELS,
    family="SGD",
    eight_bit=EightBitForm(
        {**TORCH_SWITCHES, "nesterov": False, "dampening": 0}, ("momentum", "dampening"), paged=False
    ),
)
_ADAFACTOR = {"beta2_decay": "Adafactor's decay", "eps": "Adafactor's epsilons", "d": "update clipping"}
_TORCH_ADAFACTOR = OptimizerClass(
    "torch.optim.Adafactor",
    {**_ADAFACTOR, **_DECOUPLED, **_MAXIMIZE},
    settings=frozenset({"foreach"}),
    note="the learning rate counts relative to each weight's root mean square",
)
_TORCHAO_ADAMW_4BIT = OptimizerClass(
    "torchao.optim.AdamW4bit",
    {**_ADAM, **_DECOUPLED},
    settings=frozenset({"block_size", "bf16_stochastic_round"}),
    family="Adam",
)
_LION = OptimizerClass(
    "bitsandbytes.optim.lion.Lion", {**_DECOUPLED, "betas": "Lion's momenta"}, family="Lion", eight_bit=EightBitForm()
)


def _torch(num_states: int, scratch_copies: int | None = 0, factored: bool = False) -> StateLayout:
    return StateLayout(num_states, follows_parameter=True, factored=factored, scratch_copies=scratch_copies)


def _eight_bit(num_states: int, paged: bool = False) -> StateLayout:
    # 256 elements share an fp32 scale (bitsandbytes 0.50; Dettmers et al. 2022).
    return StateLayout(num_states, 8, 256, paged=paged)


_RECORDS = (
    OptimizerRecord("sgd", _TORCH_SGD, _torch(0)),
    OptimizerRecord("sgd_momentum", _TORCH_SGD, _torch(1), arguments={"momentum": 0.9}),
    OptimizerRecord("adam", _TORCH_ADAM, _torch(2, 1)),
    OptimizerRecord("adamw", _TORCH_ADAMW, _torch(2, 1), cpu_seconds=4.4e-9, cpu_tensor_seconds=2e-5),
    OptimizerRecord(
        "adamw_fused",
        _TORCH_ADAMW,
        _torch(2),
        arguments={"fused": True},
        cpu_seconds=6.0e-10,
        cpu_tensor_seconds=3e-6,
        replacement=Replacement(
            "fused_adamw",
            "AdamW in one kernel, without the scratch memory of the batched one",
            frozenset({"exact"}),
            {"fused": True},
        ),
    ),
    OptimizerRecord(
        "adafactor",
        _TORCH_ADAFACTOR,
        _torch(0, None, factored=True),
        cpu_seconds=6.3e-9,
        cpu_tensor_seconds=2e-5,
        replacement=Replacement(
            "adafactor",
            "a row and a column of statistics per weight matrix instead of two states per weight",
            frozenset({"optimizer"}),
            {"eps": [None, 1.0e-3]},
            ("betas",),
        ),
    ),
    OptimizerRecord(
        "lion",
        _LION,
        StateLayout(1),
        cpu_seconds=8.1e-9,
        cpu_tensor_seconds=4e-5,
        replacement=Replacement(
            "lion",
            "one state per weight instead of two; wants a learning rate three to ten times smaller",
            frozenset({"optimizer"}),
            {"betas": [0.9, 0.99]},
            ("eps",),
        ),
    ),
    OptimizerRecord(
        "lion_8bit",
        _LION,
        _eight_bit(1),
        "bitsandbytes.optim.Lion8bit",
        cpu_seconds=1.6e-8,
        cpu_tensor_seconds=5e-5,
        replacement=Replacement(
            "lion_8bit",
            "Lion with 8-bit states: one byte per weight",
            frozenset({"optimizer", "8bit"}),
            {"betas": [0.9, 0.99]},
            ("eps",),
            then_8bit=True,
        ),
    ),
    OptimizerRecord("paged_adamw", _TORCH_ADAMW, StateLayout(2, paged=True), "bitsandbytes.optim.PagedAdamW"),
    OptimizerRecord("adam_8bit", _TORCH_ADAM, _eight_bit(2), "bitsandbytes.optim.Adam8bit"),
    OptimizerRecord(
        "adamw_8bit",
        _TORCH_ADAMW,
        _eight_bit(2),
        "bitsandbytes.optim.AdamW8bit",
        cpu_seconds=2.4e-8,
        cpu_tensor_seconds=8e-5,
    ),
    OptimizerRecord("sgd_8bit", _TORCH_SGD, _eight_bit(1), "bitsandbytes.optim.SGD8bit", {"momentum": 0.9}),
    OptimizerRecord("paged_adamw_8bit", _TORCH_ADAMW, _eight_bit(2, paged=True), "bitsandbytes.optim.PagedAdamW8bit"),
    # Its times come from a single run by hand with 50 million parameters; no record of it is kept.
    OptimizerRecord(
        "torchao_adamw_4bit",
        _TORCHAO_ADAMW_4BIT,
        StateLayout(2, 4, 128, scratch_copies=None),  # 128 elements share a scale
        cpu_seconds=4.6e-8,
        cpu_tensor_seconds=2.6e-4,
        replacement=Replacement(
            "torchao_adamw_4bit", "AdamW with 4-bit states: one byte per weight", frozenset({"4bit"})
        ),
    ),
)

OPTIMIZERS: dict[str, OptimizerRecord] = {record.name: record for record in _RECORDS}
"""Records by name; those of `techniques.core.registry.register_optimizer` are last."""


def find_optimizer(name: str) -> OptimizerRecord:
    """Look an optimizer up.

    Raises:
        ValueError: If there is none of that name; lists the known names.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"`optimizer={name!r}` is unknown. Choose from: {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name]


def optimizer_classes() -> dict[str, OptimizerClass]:
    """Classes that a module's optimizer can be exchanged for, by name such as `torch.AdamW`."""
    return {record.cls.name: record.cls for record in OPTIMIZERS.values()}


def class_named(name: str) -> OptimizerClass:
    """Look a class up.

    Raises:
        ValueError: If there is none of that name.
    """
    classes = optimizer_classes()
    if name not in classes:
        raise ValueError(f"`name={name!r}` is not known. Choose from {', '.join(classes)}.")
    return classes[name]


def class_of(optimizer: Any) -> OptimizerClass:
    """Return the class record of an optimizer. A subclass may compute something else and has none.

    Raises:
        ValueError: If its class has no record.
    """
    cls = type(optimizer)
    for known in optimizer_classes().values():
        if cls.__name__ == known.class_name and cls.__module__.startswith(f"{known.package}."):
            return known
    raise ValueError(
        f"`{cls.__module__}.{cls.__name__}` has hyper-parameters of unknown meaning. Return one of "
        f"{', '.join(optimizer_classes())} from `configure_optimizers`, or set the optimizer there."
    )
