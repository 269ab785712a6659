"""Names of weights in checkpoints and runs, and what is said where they differ."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn


def without_other_states(path: str | Path, strategy: str) -> str:
    """Words for a run that is asked to go on training from another strategy's checkpoint."""
    return (
        f"`ckpt_path={str(path)!r}` is no checkpoint of {strategy}, and optimizer states don't go from one "
        "strategy to another. Resume with the strategy that wrote it, or start a new optimizer from its weights: "
        "`Module.load_from_checkpoint(...)`, or `memfit export` and the model's `pretrained`."
    )


def plain_name(name: str) -> str:
    """A name in a module without what `torch.compile` has put into it."""
    return name.replace("_orig_mod.", "")


def check_names(path: str | Path, saved: Iterable[str], live: Iterable[str], strict: bool = True) -> None:
    """Refuse a checkpoint whose weights have other names than the module's.

    Raises:
        ValueError: Naming the first of them.
    """
    missing, unexpected = sorted({*live} - {*saved}), sorted({*saved} - {*live})
    if strict and (missing or unexpected):
        found = [f"has no {listed(missing)}"] if missing else []
        found += [f"has {listed(unexpected)}, which this run's module has not"] if unexpected else []
        raise ValueError(
            f"`ckpt_path={str(path)!r}` {' and '.join(found)}. Build the module as the saved run did, or set its "
            "`strict_loading = False`."
        )


def check_stepped(path: str | Path, saved: Sequence[Iterable[str]], live: Sequence[Iterable[str]]) -> None:
    """Refuse to go on where the optimizers have other weights than those of the saved run.

    Raises:
        ValueError: Naming the first of them.
    """
    if len(saved) != len(live):
        raise ValueError(
            f"`ckpt_path={str(path)!r}` has {len(saved)} optimizers or groups, this run {len(live)}. Make them as the "
            "saved run did, or load the weights alone."
        )
    for before, now in zip(saved, live, strict=True):
        new, left_out = sorted({*now} - {*before}), sorted({*before} - {*now})
        if new or left_out:
            found = [f"no optimizer states for {listed(new)}, which this run trains"] if new else []
            found += [f"states for {listed(left_out)}, which this run's optimizer has not"] if left_out else []
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has {', and '.join(found)}. Make the optimizer's groups as the saved run "
                "did, or start a new optimizer from the weights alone."
            )


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Names of a module's parameters by `id`, without the prefix that `torch.compile` gives them."""
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are, for messages."""
    return ", ".join(repr(name) for name in names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
