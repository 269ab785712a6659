"""DeepSpeed configurations from a few typed arguments, with every raw option still available."""

import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
Typed = Mapping[str, tuple[str, Any]]
"""Maps the dotted path of a DeepSpeed option to the argument that sets it and its value; None means absent."""


@dataclass(frozen=True)
class ZeroOptions:
    """The typed arguments of a ZeRO strategy that end up in DeepSpeed's configuration; see `ZeroStrategy`.

    Raises:
        ValueError: If the stage does not exist or can't do what is asked of it.
    """

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    pin_memory: bool = False
    bucket_size: int | None = None
    sub_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(
                f"`stage={self.stage!r}` must be 1, 2 or 3. Without sharding use `memfit_ddp`: DeepSpeed's stage 0 "
                "updates bf16 weights in another way than the other stages, and its losses differ."
            )
        for argument in ("offload_parameters", "sub_group_size"):
            if getattr(self, argument) and self.stage != 3:
                raise ValueError(f"`{argument}={getattr(self, argument)}` needs `stage=3`, not `stage={self.stage}`.")
        for argument in ("bucket_size", "sub_group_size"):
            if (getattr(self, argument) or 1) < 1:
                raise ValueError(f"`{argument}={getattr(self, argument)}` must be at least 1 element.")
        if self.pin_memory and not (self.offload_optimizer or self.offload_parameters):
            raise ValueError("`pin_memory=True` pins what is offloaded: set `offload_optimizer` or leave it out.")

    def config(self, raw: Mapping[str, Any]) -> Config:
        """Return DeepSpeed's configuration; sizes that the user did not give are left open until the model is known.

        Raises:
            ValueError: If `raw` contradicts an argument.
        """
        zero: Config = {"stage": self.stage, "contiguous_gradients": True, "overlap_comm": True}
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.pin_memory}
        if self.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": self.pin_memory}
        zero |= {name: size for name, size in self._sizes().items() if size is not None}
        # The micro-batch only scales DeepSpeed's throughput log; Lightning would build the loader twice to find it.
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
        return with_raw_options(config, raw, self._typed(zero))

    def _sizes(self) -> dict[str, int | None]:
        bucket = self.bucket_size
        return {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "sub_group_size": self.sub_group_size}

    def _typed(self, zero: Config) -> Typed:
        typed: dict[str, tuple[str, Any]] = {
            "stage": ("stage", self.stage),
            "offload_optimizer.device": ("offload_optimizer", "cpu" if self.offload_optimizer else None),
            "offload_param.device": ("offload_parameters", "cpu" if self.offload_parameters else None),
        }
        for name in self._sizes():
            if name in zero:
                typed[name] = ("sub_group_size" if name == "sub_group_size" else "bucket_size", zero[name])
        if self.pin_memory:
            typed["offload_optimizer.pin_memory"] = typed["offload_param.pin_memory"] = ("pin_memory", True)
        return {f"zero_optimization.{name}": entry for name, entry in typed.items()}


def with_raw_options(config: Config, raw: Mapping[str, Any], typed: Typed) -> Config:
    """Apply raw DeepSpeed options on top of a configuration, which itself stays unchanged.

    Raises:
        ValueError: If a raw option contradicts a typed argument.
    """
    merged = copy.deepcopy(config)
    for path, value in _leaves(raw):
        argument, expected = typed.get(path, ("", value))
        if value != expected and not (expected is None and value == "none"):
            raise ValueError(
                f"`config.{path}={value!r}` contradicts `{argument}`, which makes it {expected!r}. Set `{argument}` "
                "and leave the option out of `config`."
            )
        _put(merged, path, value)
    return merged


_OPTIONS = (
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comms_logger",
    "communication_data_type", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency",
    "data_types", "disable_allgather", "dump_state", "elasticity", "eigenvalue", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "memory_breakdown", "optimizer",
    "pipeline", "prescale_gradients", "progressive_layer_drop", "scheduler", "sparse_attention", "sparse_gradients",
    "steps_per_print", "tensorboard", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
"""Those of DeepSpeed 0.19's JSON at its top. Those within `zero_optimization` DeepSpeed checks by itself."""


def check_names_of_options(raw: Mapping[str, Any]) -> None:
    """Refuse misspelt options, which DeepSpeed would not read, and those that follow from the Trainer.

    Raises:
        ValueError: Naming the first such option, and the name that was probably meant.
    """
    if "train_batch_size" in raw:
        raise ValueError(
            f"`config.train_batch_size={raw['train_batch_size']!r}`: leave it out. It follows from the loader's batch "
            "size, the Trainer's number of devices and its `accumulate_grad_batches`."
        )
    for name in raw:
        near = difflib.get_close_matches(name, _OPTIONS, 1, 0.85)
        if near and near[0] != name:
            raise ValueError(
                f"`config.{name}`: DeepSpeed has no option of this name and would ignore it. Did you mean `{near[0]}`?"
            )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _put(config: Config, path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for name in sections:
        config = config.setdefault(name, {})
    if value == {}:
        config.setdefault(key, {})  # an empty section takes nothing away
    else:
        config[key] = value
