"""The calculator behind `memfit estimate --model NAME`: a configuration, no weights, no Lightning."""

from __future__ import annotations

import argparse
import sys

from lightning_memfit.estimate.named import NamedRun, profile_named
from lightning_memfit.estimate.report import EstimateReport, build_report
from lightning_memfit.estimate.target import live_target, named_target, unnamed_target
from lightning_memfit.profile.cache import ProfileCache

from .estimate import NAMED_OPTIONS

_NO_DEVICE = (
    'No device was named and there is no GPU here, so there is no verdict. Pass for example `--device "RTX 3060"`, '
    "`--device 12GiB` or `--device cpu`."
)


def estimate_named(arguments: argparse.Namespace) -> EstimateReport | None:
    """Estimate a named model on the device that was asked for or is here; None where it can't be traced."""
    try:
        return _estimate(arguments)
    except RuntimeError as error:
        from lightning_memfit.profile.trace import TraceError  # imports torch, which the cached path does without

        if not isinstance(error, TraceError):
            raise
        print(f"memfit: cannot tell: {error}", file=sys.stderr)
        return None


def _estimate(arguments: argparse.Namespace) -> EstimateReport:
    target = named_target(arguments.device) if arguments.device else live_target() or unnamed_target()
    if arguments.measure:
        raise ValueError("`--measure` needs a recipe (`--config`): a model that is only named has no weights to train.")
    given = {name: getattr(arguments, name) for name in NAMED_OPTIONS if getattr(arguments, name) is not None}
    run = NamedRun(
        arguments.model,
        micro_batch_size=arguments.micro_batch_size or 1,
        device=target.kind,
        capability=target.capability,
        **given,
    )
    profile = profile_named(run, None if arguments.no_cache else ProfileCache(), not arguments.no_shorten, overlap=True)
    notes = (_NO_DEVICE,) if target.capacity_bytes is None else ()
    return build_report(profile, target, None, notes)
