"""`memfit estimate`: how much memory a run needs, where, and whether it fits.

The run is that of a recipe (`estimate_recipe`) or of a model given by name, which is estimated here from its
configuration alone, without weights and without Lightning.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lightning_memfit.memory import Category, Tier, format_bytes
from lightning_memfit.memory.units import unit_of_column
from lightning_memfit.profile.quiet import collector_paused

from .arguments import (
    RECIPE_HELP,
    add_batch_options,
    check_new_file,
    command_parser,
    next_line,
    of_batch,
    positive,
    read_arguments,
    report_table,
    split_device,
)
from .progress import ProgressLine
from .recipe_files import configs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from lightning_memfit.estimate.division import Division
    from lightning_memfit.estimate.report import EstimateReport
    from lightning_memfit.profile.ranks import Ranks
    from lightning_memfit.profile.record import ModelProfile

_EPILOG = """\
examples:
  memfit estimate --config gpt2xl --device "RTX 3060"
  memfit estimate --config mine.yaml --with optimizer_8bit --json
  memfit estimate --model gpt2-xl --micro-batch-size 4 --precision bf16-mixed --device 24GiB

exit codes: 0 it fits, 1 it does not, 2 cannot tell (or a mistake, which is explained)
"""

_NAMED: dict[str, dict[str, Any]] = {
    "sequence_length": {"type": positive, "metavar": "N", "help": "tokens per sample"},
    "precision": {"help": "32-true, bf16-mixed, 16-mixed, bf16-true or 16-true (default: 32-true)"},
    "optimizer": {"help": "adamw, adamw_fused, sgd, adamw_8bit, ... (default: adamw)"},
    "checkpointing": {"choices": ("none", "full"), "help": "activation checkpointing (default: none)"},
    "attention": {"choices": ("sdpa", "eager"), "help": "attention (default: as transformers chooses)"},
    "technique": {
        "action": "append",
        "metavar": "NAME[:KEY=VALUE,...]",
        "help": "apply a technique, e.g. lora:rank=8 or gradient_release; repeat for more",
    },
    "accumulate_grad_batches": {"type": positive, "metavar": "N", "help": "default: 1"},
    "strategy": {"metavar": "NAME", "help": "ddp, fsdp2, zero_1 ... zero_infinity: figures are those of one rank"},
    "devices": {"type": positive, "metavar": "N", "help": "ranks of the strategy, on one machine (default: 1)"},
}
"""Options of a model that is only named, which a recipe sets itself."""


def main(argv: list[str]) -> int:
    """Estimate, print, and return the exit code."""
    parser = make_parser(of_recipe=bool(configs_of(argv)))
    arguments, overrides = read_arguments(parser, argv)
    if arguments.config is None and arguments.model is None:
        parser.error("give `--config RECIPE`, or `--model NAME` for a model that is only named")
    if arguments.timeline is not None:
        check_new_file("--timeline", Path(arguments.timeline))
    if arguments.config is None and overrides:
        parser.error(f"`{overrides[0]}` needs `--config`: a model that is only named takes the options above")
    given = [name for name in _NAMED if getattr(arguments, name) is not None]
    if arguments.config is not None and given:
        option = f"--{given[0].replace('_', '-')}"
        raise ValueError(
            f"`{option}` is for `--model NAME`. A recipe states it: override `trainer`, `model` or `data`."
        )
    atexit.register(gc.freeze)  # walking torch's and transformers' objects once more takes over a second at exit
    # Real steps may need the memory that the collector frees.
    with contextlib.nullcontext() if arguments.measure else collector_paused():
        with ProgressLine("estimating", is_quiet=arguments.json) as line:
            if arguments.config is None:
                report = estimate_named(arguments, line.tell)
            else:
                from .estimate_recipe import EstimateRequest, estimate_recipe  # imports Lightning

                report = estimate_recipe(EstimateRequest.of(arguments, overrides), line.tell)
        if not arguments.measure:
            gc.freeze()  # else the collector, once it is back, walks all of that at its first chance
    if report is None:
        return 2
    _show(report, arguments)
    if not arguments.json:
        print(_next(report, arguments, overrides))
    return report.verdict.exit_code


def make_parser(of_recipe: bool) -> argparse.ArgumentParser:
    """Make the parser for our own options; all others, and `--model` beside a recipe, belong to the recipe."""
    parser = command_parser(
        "estimate",
        "Say how much memory training needs, where and why, without using it.",
        _EPILOG,
        "(--config RECIPE [--KEY VALUE ...] | --model NAME [options]) [options]",
    )
    both = parser.add_argument_group("for both")
    both.add_argument(
        "--device", metavar="NAME", help="GPU by name, a size such as 12GiB, several such as '8x A100 80GB', or cpu"
    )
    both.add_argument(
        "--micro-batch-size", type=positive, metavar="N", help="samples at a time (default: the recipe's)"
    )
    both.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    both.add_argument("--timeline", metavar="FILE.html", help="draw memory over the step; never overwrites")
    both.add_argument("--no-cache", action="store_true", help="neither read nor write cached profiles")
    recipe = parser.add_argument_group("for a recipe", RECIPE_HELP)
    recipe.add_argument("--measure", action="store_true", help="run two real steps here if tracing fails")
    add_batch_options(recipe)
    named = parser.add_argument_group("for a model that is only named")
    if not of_recipe:
        named.add_argument(
            "--model",
            metavar="NAME",
            help="gpt2-xl, llama-3.1-8b, ..., OWNER/NAME on the hub, or a folder with a config.json",
        )
    for name, options in _NAMED.items():
        named.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser


def _show(report: EstimateReport, arguments: argparse.Namespace) -> None:
    is_divided = report.division is not None and not report.division.traced
    if arguments.timeline is not None:
        from lightning_memfit.estimate.report import build_report
        from lightning_memfit.estimate.timeline import write_timeline

        whole = build_report(report.profile, report.target, report.estimate.micro_batch_size)
        write_timeline(whole if is_divided else report, arguments.timeline)
    if arguments.json:
        json.dump(report.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    print_report(report)
    if arguments.timeline is not None:
        of_what = " of the traced step, as if one device held everything" if is_divided else ""
        print(f"Timeline{of_what}: {arguments.timeline}")


def _next(report: EstimateReport, arguments: argparse.Namespace, overrides: list[str]) -> str:
    """Say how to go on: with a plan, where one can be made."""
    if arguments.config is None:
        return next_line("recipes", [], "start from one of them to plan and train")
    device = arguments.device or (None if report.target.capacity_bytes is not None else "12GiB")
    named = [] if device is None else ["--device", device]
    return next_line("plan", [*overrides, *named, *of_batch(arguments)])


# --- what `memfit estimate` prints ------------------------------------------------------------------------------------


LABELS: dict[Category, str] = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer states",
    Category.ACTIVATION: "activations",
    Category.TEMPORARY: "temporary",
    Category.INPUT: "batch",
    Category.COMMUNICATION: "communication",
    Category.RUNTIME_CONTEXT: "CUDA context",
    Category.FRAGMENTATION: "fragmentation",
}


_PLACES = {Tier.PINNED_HOST: "page-locked host memory", Tier.HOST: "host memory", Tier.DISK: "disk"}


def print_report(report: EstimateReport) -> None:
    """Print a report on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_headline(report.profile, report.estimate.micro_batch_size), style="bold")
    if report.division is not None:
        console.print(_division(report.division), markup=False)
    console.print(_breakdown(report))
    if any(tier is not Tier.DEVICE for tier, _, _ in report.estimate.breakdown):
        console.print(_off_device(report))
    console.print(_largest(report))
    for line in _lines(report):
        console.print(line)
    for note in report.notes:
        console.print(f"- {note}", style="yellow", markup=False)
    console.print(_verdict(report))


def _headline(profile: ModelProfile, micro_batch_size: int) -> Text:
    trained = "" if profile.num_trainable == profile.num_parameters else f", {profile.num_trainable:,} trained"
    size = f"micro-batch {micro_batch_size}"
    size += f" x {profile.sequence_length} tokens" if profile.sequence_length else ""
    size += f", {profile.accumulate_grad_batches} accumulated" if profile.accumulate_grad_batches > 1 else ""
    parts = [f"{profile.name}: {profile.num_parameters:,} parameters{trained}", profile.precision]
    return Text(" | ".join([*parts, profile.optimizer or "no optimizer", size]))


def _division(division: Division) -> str:
    return f"{division.name} on {division.ranks} device{'s' * (division.ranks > 1)}: figures are those of one rank"


def _off_device(report: EstimateReport) -> Table:
    """Host memory at its own peak, and disk."""
    breakdown = report.estimate.breakdown
    name_of_unit, unit = unit_of_column(breakdown.total(tier) for tier in _PLACES)
    table = report_table("Off the device, at most", "place", "category", f">{name_of_unit}")
    for tier, label in _PLACES.items():
        for category, size in breakdown.by_category(tier).items():
            name = "libraries" if category is Category.RUNTIME_CONTEXT else LABELS[category]
            table.add_row(label, name, f"{size / unit:.3f}")
        if breakdown.total(tier):
            table.add_row(label, "total", f"{breakdown.total(tier) / unit:.3f}", style="bold")
    return table


def _breakdown(report: EstimateReport) -> Table:
    estimate, parameters = report.estimate, report.profile.num_parameters
    name_of_unit, unit = unit_of_column([estimate.total_bytes])
    title = f"At the peak, in {estimate.phase}, on {report.target.name}"
    table = report_table(title, "category", f">{name_of_unit}", ">share", ">bytes per parameter")

    def add(label: str, size: int, style: str = "") -> None:
        per_parameter = f"{size / parameters:.2f}" if parameters else ""
        share = f"{size / (estimate.total_bytes or 1):.1%}"
        table.add_row(label, f"{size / unit:.3f}", share, per_parameter, style=style)

    for category, size in estimate.breakdown.by_category().items():
        libraries = category is Category.RUNTIME_CONTEXT and report.target.device_kind.is_host
        add("libraries" if libraries else LABELS[category], size)
    table.add_section()
    add("total", estimate.total_bytes, "bold")
    return table


def _largest(report: EstimateReport) -> Table:
    name_of_unit, unit = unit_of_column(tensor.size_bytes for tensor in report.estimate.largest)
    table = report_table("Largest tensors at the peak", f">{name_of_unit}", "category", "module", "operator")
    for tensor in report.estimate.largest:
        module, _, operator = tensor.site.rpartition(" | ")
        if not module and not operator.startswith("aten."):
            module, operator = operator, ""
        operator = operator.removeprefix("aten.").removesuffix(".default")
        table.add_row(f"{tensor.size_bytes / unit:.3f}", LABELS[tensor.category], module, operator)
    return table


def _lines(report: EstimateReport) -> list[str]:
    estimate, profile = report.estimate, report.profile
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in estimate.by_phase.items())
    lines = [f"Peak by phase: {phases}"]
    if report.target.device_kind.has_caching_allocator:
        lines.append(
            f"Allocated {format_bytes(estimate.allocated_bytes)} in the allocator's whole blocks"
            + (f" ({format_bytes(estimate.spare_bytes)} of it to spare)" if estimate.spare_bytes else "")
            + f", reserved {format_bytes(estimate.reserved_bytes)}"
            + (f", with the CUDA context {format_bytes(estimate.total_bytes)}" if report.target.runtime else "")
        )
    elif estimate.total_bytes > estimate.allocated_bytes:
        lines.append(
            f"Live tensors {format_bytes(estimate.allocated_bytes)}, resident {format_bytes(estimate.total_bytes)} "
            "with libraries and holes in the heap"
        )
    else:
        lines.append(f"Live tensors {format_bytes(estimate.total_bytes)}, without the program's own memory")
    if report.verdict.host_needed_bytes:
        lines.append(_host_memory(report))
    if profile.num_blocks:
        traced = "all" if profile.traced_blocks == profile.num_blocks else f"{profile.traced_blocks} traced, alike"
        lines.append(f"Repeated blocks: {profile.num_blocks} x {profile.block_class} ({traced})")
    if profile.attention_kernels:
        lines.append(f"Attention kernel: {', '.join(profile.attention_kernels)}")
    if report.target.usable_bytes is not None:
        largest, unknown = report.largest_micro_batch, f"unknown, as {profile.only_this_size}"
        found = unknown if largest is None else f"{largest or 'none, not even one sample'}"
        lines.append(f"Largest micro-batch that fits: {found}")
    return lines


def _host_memory(report: EstimateReport) -> str:
    verdict, ranks = report.verdict, report.division.ranks_per_machine if report.division is not None else 1
    text = f"Host memory for {ranks} rank{'s' * (ranks > 1)} of a machine: {format_bytes(verdict.host_needed_bytes)}"
    if verdict.host_usable_bytes is None:
        return f"{text}, which the verdict takes for granted"
    return f"{text}, of {format_bytes(verdict.host_usable_bytes)} that may be used here"


def _verdict(report: EstimateReport) -> Text:
    target, needed = report.target, report.verdict.needed_bytes
    if target.capacity_bytes is None:
        return Text(f"Cannot tell: needs {format_bytes(needed)}", style="bold yellow")
    margin = f" and a margin of {format_bytes(target.margin_bytes)}" if target.margin_bytes else ""
    have = f"{target.name} has {format_bytes(target.capacity_bytes)} ({target.source})"
    words, colour = {True: ("Fits", "green"), False: ("Does not fit", "red"), None: ("Cannot tell", "yellow")}[
        report.verdict.fits
    ]
    return Text(f"{words}: needs {format_bytes(needed)}{margin}, {have}", style=f"bold {colour}")


# --- models by name: a configuration, no weights, no Lightning --------------------------------------------------------


_NO_DEVICE = (
    'No device was named and there is no GPU here, so there is no verdict. Pass for example `--device "RTX 3060"`, '
    "`--device 12GiB` or `--device cpu`."
)


def estimate_named(arguments: argparse.Namespace, tell: Callable[[str], None]) -> EstimateReport | None:
    """Estimate a named model on the given device or this machine's; None if the model can't be traced."""
    try:
        return _estimate(arguments, tell)
    except RuntimeError as error:
        from lightning_memfit.profile.trace import TraceError  # imports torch, which a cached estimate does not need

        if not isinstance(error, TraceError):
            raise
        print(f"memfit: cannot tell: {error}", file=sys.stderr)
        return None


def _estimate(arguments: argparse.Namespace, tell: Callable[[str], None]) -> EstimateReport:
    from lightning_memfit.estimate.architectures import PRECISIONS, NamedRun
    from lightning_memfit.estimate.named import profile_named
    from lightning_memfit.estimate.report import build_report
    from lightning_memfit.estimate.target import live_target, named_target, unnamed_target
    from lightning_memfit.profile.cache import ProfileCache

    count, named = split_device(arguments.device)
    if count is not None and arguments.devices not in (None, count):
        raise ValueError(f"`--device` names {count} devices, `--devices` {arguments.devices}. Drop one.")
    arguments.devices = count or arguments.devices
    target = named_target(named) if named is not None else live_target() or unnamed_target()
    if arguments.batch_shape is not None or arguments.real_batch:
        raise ValueError("`--batch-shape` and `--real-batch` are for a recipe (`--config`).")
    if arguments.measure:
        raise ValueError("`--measure` needs a recipe (`--config`): a model that is only named has no weights to train.")
    given = {name: getattr(arguments, name) for name in _NAMED if getattr(arguments, name) is not None}
    techniques = tuple(given.pop("technique", ()))
    division = _named_division(given.pop("strategy", None), given.pop("devices", None))
    precision = given.get("precision", "32-true")
    if division is not None and precision in PRECISIONS:
        given["precision"] = division.traced_precision(precision)
    run = NamedRun(
        arguments.model,
        micro_batch_size=arguments.micro_batch_size or 1,
        device=target.kind,
        capability=target.capability,
        techniques=techniques,
        **given,
    )
    make_callbacks = _callbacks_of(techniques) if techniques else tuple
    cache = None if arguments.no_cache else ProfileCache()
    ranks = _named_ranks(division) if division is not None and division.traced else None
    tell(f"tracing a step of {arguments.model}")
    profile = profile_named(run, cache, callbacks=make_callbacks, ranks=ranks)
    notes = (_NO_DEVICE,) if target.capacity_bytes is None else ()
    profile = replace(profile, precision=precision)
    return build_report(profile, target, run.micro_batch_size, notes, division)


def _named_division(name: str | None, devices: int | None) -> Division | None:
    """How a strategy of our registry divides a run, as `Trainer(strategy="memfit_NAME", devices=N)` would."""
    if name is None:
        if devices is not None and devices > 1:
            raise ValueError(f"`--devices {devices}` needs `--strategy`, for example ddp or zero_2.")
        return None
    from lightning_memfit.techniques.core.registry import all_strategies

    records = {record.name: record for record in all_strategies()}
    record = records.get(name.removeprefix("memfit_"))
    if record is None or record.sharding is None:
        raise ValueError(f"`--strategy {name}` is unknown. Choose from: {', '.join(records)}.")
    ranks = devices or 1
    return record.sharding.division(f"memfit_{record.name}", ranks, ranks)


def _named_ranks(division: Division) -> Ranks:
    """The ranks of a run under a strategy of our registry."""
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_memfit.strategies  # noqa: F401  (registers them)
    from lightning_memfit.profile.ranks import Ranks

    return Ranks(partial(StrategyRegistry.get, division.name), division.ranks)


def _callbacks_of(techniques: Sequence[str]) -> Callable[[], tuple[Any, ...]]:
    """Return a function that makes the callbacks of techniques given as `NAME` or `NAME:KEY=VALUE,...`."""
    import yaml

    from lightning_memfit.techniques.core.registry import find_technique
    from lightning_memfit.techniques.core.setting import Setting

    setting = Setting()
    for text in techniques:
        name, _, options = text.partition(":")
        technique = find_technique(name)
        given: dict[str, Any] = yaml.safe_load(f"{{{options.replace('=', ': ')}}}")
        malformed = next((key for key, value in given.items() if value is None), None)
        if malformed is not None:
            raise ValueError(f"`--technique {text}`: `{malformed}` has no value. Write NAME:KEY=VALUE,KEY=VALUE.")
        known = setting.of_kind(technique.kind)
        if known is not None:
            raise ValueError(f"`--technique {known.name}` and `{name}` both decide the {technique.kind}. Drop one.")
        if technique.kind == "precision":
            raise ValueError(
                f"`--technique {name}` is a precision. Pass `--precision {technique.trainer['precision']}`."
            )
        if not technique.traced or technique.kind == "strategy":
            raise ValueError(f"`--technique {name}` changes nothing that one device's memory shows. Leave it out.")
        technique.configured(**given)  # refuses unknown options
        setting = setting.choose(name, **given)

    def make_callbacks() -> tuple[Any, ...]:
        try:
            return setting.traced_callbacks()
        except TypeError as error:  # a word where a number is expected, say
            raise ValueError(
                f"`--technique {', '.join(techniques)}`: an option has the wrong type ({error})."
            ) from error

    return make_callbacks
