"""What `memfit estimate` prints for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memfit.estimate.report import EstimateReport
from lightning_memfit.memory import GIB, Category, format_bytes
from lightning_memfit.profile.record import ModelProfile

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


def print_report(report: EstimateReport) -> None:
    """Print a report on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_headline(report.profile, report.estimate.micro_batch_size), style="bold")
    console.print(_breakdown(report))
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


def _breakdown(report: EstimateReport) -> Table:
    estimate = report.estimate
    table = Table(title=f"At the peak, in {estimate.phase}, on {report.target.name}", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("category")
    for heading in ("GiB", "share", "bytes per parameter"):
        table.add_column(heading, justify="right")
    total = estimate.total_bytes or 1
    for category, size in estimate.breakdown.by_category().items():
        table.add_row(LABELS[category], *_figures(size, total, report.profile.num_parameters))
    table.add_section()
    table.add_row("total", *_figures(estimate.total_bytes, total, report.profile.num_parameters), style="bold")
    return table


def _figures(size: int, total: int, num_parameters: int) -> tuple[str, str, str]:
    per_parameter = f"{size / num_parameters:.2f}" if num_parameters else ""
    return f"{size / GIB:.3f}", f"{size / total:.1%}", per_parameter


def _largest(report: EstimateReport) -> Table:
    table = Table(title="Largest tensors at the peak", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("GiB", justify="right")
    for heading in ("category", "module", "operator"):
        table.add_column(heading, overflow="fold")
    for tensor in report.estimate.largest:
        module, _, operator = tensor.site.rpartition(" | ")
        if not module and not operator.startswith("aten."):
            module, operator = operator, ""
        operator = operator.removeprefix("aten.").removesuffix(".default")
        table.add_row(f"{tensor.size_bytes / GIB:.3f}", LABELS[tensor.category], module, operator)
    return table


def _lines(report: EstimateReport) -> list[str]:
    estimate, profile = report.estimate, report.profile
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in estimate.by_phase.items())
    lines = [f"Peak by phase: {phases}"]
    if report.target.kind == "cuda":
        lines.append(
            f"Allocated {format_bytes(estimate.allocated_bytes)}, reserved {format_bytes(estimate.reserved_bytes)}, "
            f"with the CUDA context {format_bytes(estimate.total_bytes)}"
        )
    else:
        lines.append(f"Live tensors {format_bytes(estimate.total_bytes)}, without the program's own memory")
    if profile.num_blocks:
        traced = "all" if profile.traced_blocks == profile.num_blocks else f"{profile.traced_blocks} traced, alike"
        lines.append(f"Repeated blocks: {profile.num_blocks} x {profile.block_class} ({traced})")
    if profile.attention_kernels:
        lines.append(f"Attention kernel: {', '.join(profile.attention_kernels)}")
    if report.target.usable_bytes is not None:
        lines.append(_largest_micro_batch(report))
    return lines


def _largest_micro_batch(report: EstimateReport) -> str:
    if report.largest_micro_batch is None:
        return f"Largest micro-batch that fits: unknown, as {report.profile.only_this_size}"
    return f"Largest micro-batch that fits: {report.largest_micro_batch or 'none, not even one sample'}"


def _verdict(report: EstimateReport) -> Text:
    target, needed = report.target, report.verdict.needed_bytes
    if report.verdict.fits is None or target.capacity_bytes is None:
        return Text(f"Cannot tell: needs {format_bytes(needed)}", style="bold yellow")
    margin = f" and a margin of {format_bytes(target.margin_bytes)}" if target.margin_bytes else ""
    have = f"{target.name} has {format_bytes(target.capacity_bytes)} ({target.source})"
    if report.verdict.fits:
        return Text(f"Fits: needs {format_bytes(needed)}{margin}, {have}", style="bold green")
    return Text(f"Does not fit: needs {format_bytes(needed)}{margin}, {have}", style="bold red")
