"""Estimate a recipe (`memfit estimate --config`): its own model, data, precision and techniques on fake tensors."""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.report import EstimateReport, build_report
from lightning_memfit.estimate.target import Target, host_target, live_target, named_target, unnamed_target
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.kind import CPU, allows_cuda
from lightning_memfit.profile.build import batch_size, measure_step, profile_module, resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.process import end_after_traces
from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import Emulation, TraceError, of_built
from lightning_memfit.techniques.core.precision import AnyTechnique

from .arguments import split_device
from .errors import user_mistake
from .recipe_run import RecipeRun, load_recipe

if TYPE_CHECKING:
    from lightning_memfit.estimate.division import Division
    from lightning_memfit.profile.ranks import Ranks

_NO_DEVICE = (
    "The recipe asks for a GPU, none was named and there is none here, so there is no verdict. Pass for example "
    '`--device "RTX 3060"`, `--device 12GiB` or `--device cpu`.'
)


@dataclass(frozen=True)
class RecipeRequest:
    """What a command line asks of a recipe, read once."""

    recipe: tuple[str, ...]
    """Its words for the recipe, as for `memfit fit`."""
    device: str | None = None
    """Name of one device; None for what is here."""
    num_devices: int | None = None
    """How many of them were named; None if that is left to the recipe."""
    batch_shape: str | None = None
    real_batch: bool = False
    use_cache: bool = True

    @staticmethod
    def shared(arguments: argparse.Namespace, recipe: Sequence[str]) -> dict[str, Any]:
        """Fields of this class, from a command's own arguments."""
        count, device = split_device(arguments.device)
        given = {"batch_shape": arguments.batch_shape, "real_batch": arguments.real_batch}
        named = {"recipe": tuple(recipe), "device": device, "num_devices": count}
        return {**named, **given, "use_cache": not arguments.no_cache}


@dataclass(frozen=True)
class EstimateRequest(RecipeRequest):
    """What a command line asks of the estimate of a recipe, read once."""

    micro_batch_size: int | None = None
    measure: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace, recipe: Sequence[str]) -> EstimateRequest:
        """Read the command's own arguments."""
        shared = cls.shared(arguments, recipe)
        return cls(micro_batch_size=arguments.micro_batch_size, measure=arguments.measure, **shared)


def estimate_recipe(request: EstimateRequest, tell: Callable[[str], None]) -> EstimateReport | None:
    """Estimate a recipe; if its step can't be traced, say why and return None."""
    words, size = list(request.recipe), request.micro_batch_size
    with quiet(), load_recipe(words, request.batch_shape, request.real_batch, request.measure) as run:
        target = target_of(request.device, run)
        run = replace(run, devices=devices_here(run, request.device, request.num_devices, target))
        if request.num_devices not in (None, (run.devices or 1) * run.num_nodes):
            said = f"{run.devices} devices on {run.num_nodes} machine{'s' * (run.num_nodes > 1)}"
            raise ValueError(
                f"`--device` names {request.num_devices} devices, the recipe {said}. Set `trainer.devices`, the number "
                "on each machine."
            )
        division, notes = division_of_recipe(run)
        notes += run.notes
        precision = run.options.precision
        if division is not None:
            traced = division.traced_precision(precision)
            run = replace(run, options=replace(run.options, precision=traced))  # type: ignore[arg-type]
        run, waiting_bytes, left_out = _as_cut(run, division, size)
        notes += left_out
        ranks = _ranks(run, division) if division is not None else None
        tell(f"tracing a step of {type(run.module).__name__}")
        try:
            profile = _profile(run, target, request, ranks)
        except TraceError as error:
            mistake = user_mistake(error)  # a mistake in the recipe, which would also stop a measurement
            if mistake is not None:
                raise mistake from None
            if not request.measure:
                told = f"{error} On the command line that is `--measure`. {run.example}".rstrip()
                print(f"memfit: cannot tell: {told}", file=sys.stderr)
                return None
            tell("running two steps")
            profile = _measure(run)
            if division is not None and division.traced:
                notes.insert(0, _not_in_figures(division.name, "one process was measured"))
                division = None
    notes += [_NO_DEVICE] if target.capacity_bytes is None else []
    profile = replace(profile, precision=precision)
    try:
        return build_report(profile, target, size, tuple(notes), division, waiting_bytes)
    except ValueError as error:
        if type(error).__name__ != "NotDividedError" or division is None:
            raise
        notes.insert(0, _not_in_figures(division.name, error))
        return build_report(profile, target, size, tuple(notes), None, waiting_bytes)


def _as_cut(run: RecipeRun, division: Division | None, asked: int | None) -> tuple[RecipeRun, int, list[str]]:
    """A recipe's run in the micro-batches that its `MicroBatching` is told to cut.

    At `auto` it cuts as few as fit, and the figures are those of the whole batch.
    """
    if run.batching is None:
        return run, 0, []
    replicas = (run.devices or 1) * run.num_nodes // ranks_together(run.strategy)
    loaded, size, accumulate = run.sizes(replicas, asked)
    if division is not None and division.stage == 0 and division.ranks > 1:
        accumulate = max(2, accumulate)  # it synchronizes no pass, as Lightning does none but the last
    options = replace(run.options, accumulate_grad_batches=accumulate)
    if run.batching.options.micro_batch_size == "auto":
        return replace(run, options=options), 0, []
    rows = batch_size(run.batch)
    try:
        batch = resize_batch(run.batch, rows, size)
    except ValueError as error:
        return run, 0, [f"`MicroBatching` is not in the figures, which are those of the whole batch: {error}."]
    waiting = sum(tensor.nbytes for tensor in tensors_in(run.batch)) * (loaded - size) // rows
    return replace(run, batch=batch, options=options), waiting, []


def ranks_together(strategy: Any) -> int:
    """Ranks that compute a model together on one batch: more than 1 if they share its layers or its sequences."""
    try:
        made = make_strategy(strategy)
        return int(getattr(made, "tensor_parallel_size", 1) * getattr(made, "sequence_parallel_size", 1))
    except Exception:  # whatever its class raises is said where the recipe's own setting is left out
        return 1


def devices_here(run: RecipeRun, device: str | None, named: int | None, target: Target) -> int | None:
    """Devices of each machine: the recipe's, else those that the user named, else all GPUs here; None if unknown."""
    if run.devices is not None:
        return run.devices
    if named is not None:
        here, left = divmod(named, run.num_nodes)
        if left:
            raise ValueError(
                f"`--device` names {named} devices, which the recipe's {run.num_nodes} machines can't share. Name a "
                f"multiple of {run.num_nodes}, or set `--trainer.num_nodes=1`."
            )
        return here
    if device is None and target.device_kind.has_own_memory and target.capacity_bytes is not None:
        import torch

        return torch.cuda.device_count()
    return None


def division_of_recipe(run: RecipeRun) -> tuple[Division | None, list[str]]:
    """How the recipe's strategy divides the run, and what the figures don't say about it."""
    per_machine = run.devices or 1
    ranks, spec = per_machine * run.num_nodes, run.strategy
    if spec == "auto" and ranks == 1:
        return None, []
    from lightning_memfit.estimate.division import NotDividedError, division_of

    name = _name_of(spec)
    try:
        division = division_of(make_strategy(spec), name, ranks, per_machine)
    except (NotDividedError, ModuleNotFoundError) as error:
        return None, [_not_in_figures(name, error)]
    if division is None or run.devices is not None:
        return division, []
    return division, ["`trainer.devices` names no number: the figures are for one device on each machine."]


def division_in_plans_of(run: RecipeRun) -> Division | None:
    """How the recipe's strategy divides the run, as plans see it."""
    from lightning_memfit.estimate.division import division_in_plans

    per_machine = run.devices or 1
    return division_in_plans(
        make_strategy(run.strategy), _name_of(run.strategy), per_machine * run.num_nodes, per_machine
    )


def _name_of(spec: Any) -> str:
    name = spec if isinstance(spec, str) else str(spec.get("class_path", "")).rpartition(".")[2]
    return "DDP" if name == "auto" else name


def _ranks(run: RecipeRun, division: Division) -> Ranks | None:
    """The ranks of a recipe's run; None if what one of them needs is worked out from a trace of one device."""
    from lightning_memfit.profile.ranks import Ranks

    make: Callable[[], Any] = partial(make_strategy, run.strategy)
    size = getattr(make(), "sequence_parallel_size", 1)
    if not division.traced and size == 1:
        return None
    if not division.traced:
        from lightning_memfit.strategies.sequence_parallel import SequencesAlone

        make = partial(SequencesAlone, size)
    return Ranks(make, division.ranks, 0, division.ranks_per_machine)


def _not_in_figures(name: str, error: Exception | str) -> str:
    return (
        f"`trainer.strategy={name}` is not in the figures, which are those of one device that holds everything: "
        f"{str(error).rstrip('.')}."
    )


def make_strategy(spec: Any) -> Any:
    """Make a recipe's strategy, without processes or devices."""
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_memfit.estimate.division import NotDividedError

    if isinstance(spec, str):
        spec = "ddp" if spec == "auto" else spec  # Lightning's choice for several devices
        if spec not in StrategyRegistry:
            raise NotDividedError("Lightning knows no strategy of that name")
        entry = StrategyRegistry[spec]
        made, arguments = entry["strategy"], dict(entry["init_params"])
    else:
        folder, _, class_name = spec["class_path"].rpartition(".")
        made, arguments = getattr(import_module(folder), class_name), dict(spec.get("init_args") or {})
        arguments |= spec.get("dict_kwargs") or {}
    if "nvme_path" in {**arguments, **inspect.signature(made).parameters} and not arguments.get("nvme_path"):
        arguments["nvme_path"] = "."  # nothing is written there by making the strategy
    try:
        return made(**arguments)
    except TypeError as error:
        raise NotDividedError(f"it can't be made here ({error})") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress banners, and keep what the user's code prints off stdout, which belongs to the report of a command."""
    end_after_traces()
    with (
        loggers_at(logging.ERROR, *LIGHTNING, "bitsandbytes", "transformers"),
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".*(worker|Paged optimizers|No seed found)", UserWarning)
        yield


def target_of(name: str | None, run: RecipeRun) -> Target:
    """Return the named device, else this machine's GPU, else its CPU unless the recipe requires a GPU."""
    limits = [callback.limit_bytes for callback in run.callbacks if isinstance(callback, MemoryLimit)]
    if name is not None and name.strip().lower() != CPU:
        return named_target(name)
    if name is None and allows_cuda(run.accelerator):
        live = live_target(run.device_numbers, limits)
        if live is not None:
            return live
        if run.accelerator != "auto":
            return unnamed_target()
    elif name is None and run.accelerator != CPU:
        raise ValueError(
            f"`trainer.accelerator={run.accelerator!r}`: estimates are for CUDA and the CPU. Pass `--device`."
        )
    return host_target(min(limits) if limits else None)


def _profile(run: RecipeRun, target: Target, request: EstimateRequest, ranks: Ranks | None) -> ModelProfile:
    """Profile the step from the recipe's batch, or at the size asked for if the batch tells nothing about that size."""

    def profile(batch: Any) -> ModelProfile:
        return profile_module(
            run.module,
            batch,
            run.options,
            Emulation(target.kind, target.capability),
            _techniques(run),
            cache=ProfileCache() if request.use_cache else None,
            ranks=ranks,
        )

    found, size = profile(run.batch), batch_size(run.batch)
    wanted = request.micro_batch_size or size
    if wanted == size or found.knows_every_size:
        return found
    return profile(resize_batch(run.batch, size, wanted))


def _techniques(run: RecipeRun) -> tuple[AnyTechnique, ...]:
    return tuple(copy.deepcopy(c) for c in run.callbacks if isinstance(c, AnyTechnique))


def _measure(run: RecipeRun) -> ModelProfile:
    """Run two real steps if host memory is enough for them."""
    weights = of_built(run.module, lambda built: sum(p.numel() * p.element_size() for p in built.parameters()))
    # The module, what an update copies of it, gradients and two fp32 states; the activations' need isn't known.
    needed, available = 5 * weights, host_target().usable_bytes or 0
    if needed > available:
        raise ValueError(
            f"`--measure` needs about {format_bytes(needed)} for the states alone, {format_bytes(available)} of RAM is "
            "free. Measure a smaller configuration of the model."
        )
    return measure_step(run.module, run.batch, run.options, _techniques(run))
