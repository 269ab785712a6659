"""`memfit: auto` in a recipe: `MemFit` takes the place of the techniques that it names."""

import sys
from typing import Any

from jsonargparse import Namespace

from lightning_memfit.planner.overlay import is_technique

_MEM_FIT = "lightning_memfit.fitting.auto.MemFit"


def plan_automatically(trainer: Any) -> None:
    """Change a trainer's configuration, and say which callbacks the plan replaces.

    Args:
        trainer: Of a parsed recipe, nothing of it instantiated.
    """
    named = trainer.callbacks or []
    callbacks = named if isinstance(named, list) else [named]
    replaced = [spec.class_path for spec in callbacks if is_technique(spec.class_path)]
    kept = [spec for spec in callbacks if spec.class_path not in replaced]
    if not any(spec.class_path.endswith(".MemFit") for spec in kept):
        kept = [Namespace(class_path=_MEM_FIT, init_args=Namespace(allow=None, host_memory=None, probe=True)), *kept]
    if replaced:
        names = ", ".join(path.rpartition(".")[2] for path in replaced)
        print(f"memfit: auto: the plan replaces {names}.", file=sys.stderr)
    trainer.callbacks = kept
