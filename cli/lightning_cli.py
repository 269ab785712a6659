"""`MemFitCLI`: Lightning's command line with our recipes and errors."""

import enum
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, _typehints, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method

from .explain import closest, explain, import_public_names
from .recipe_files import configs_of, resolve_arguments, without_config
from .recipe_schema import MADE_FOR, check_numbers, check_recipe

# Warnings about calls of Lightning 2.6, which jsonargparse 4.5x (pinned below 5) and torch have deprecated.
_DEPRECATED_CALLS = (
    r"\s*By default only one JsonargparseDeprecationWarning",
    r"\s*(``)?(ArgumentParser\.)?(instantiate_classes|add_instantiator|skip_none)",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


# Lightning's `Timer` has an enum as the default of a text, which jsonargparse then can't write (Lightning 2.6).
yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))


class MemFitCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` for any LightningModule and LightningDataModule.

    With `run=False` there are no subcommands: the files and options of a `fit` give `model`, `datamodule` and `trainer`
    without running anything.

    Args:
        args: Arguments as on the command line; recipes may be given by name. None takes the command line's.
        run: Whether to run a subcommand.
        options: Further arguments of `LightningCLI`.
    """

    def __init__(self, args: ArgsType = None, run: bool = True, **options: Any) -> None:
        for message in _DEPRECATED_CALLS:
            warnings.filterwarnings("ignore", message)
        arguments = sys.argv[1:] if args is None else args
        # They are read from the source of every class, for those who ask for help.
        set_parsing_settings(docstring_parse_attribute_docstrings=_asks_for_help(arguments))
        _try_whole_numbers_first()
        super().__init__(
            args=args,
            run=run,
            parser_kwargs=_parser_arguments(run),
            auto_configure_optimizers=False,
            **options,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Replace recipe names by their files, then parse."""
        arguments = sys.argv[1:] if args is None else args
        if isinstance(arguments, Sequence):
            words = resolve_arguments(arguments)
            self.import_classes(words)
            try:
                self.config = self.parse_plan(parser, words)
            except ArgumentError as error:
                recipes = [check_recipe(Path(path)) for path in configs_of(words)]
                raise ValueError(explain(error, parser, recipes, words)) from error
        else:
            import_public_names()
            self.config = parser.parse_object(arguments)
        section = _section(self.config)
        check_numbers(section)
        _check_choices(section.get("trainer") or {})

    def parse_plan(self, parser: LightningArgumentParser, arguments: list[str]) -> Namespace:
        """Parse arguments; if a plan's file is among them, see that it was made for this recipe, and lay it over."""
        files = {path: check_recipe(Path(path)) for path in configs_of(arguments)}
        plans = [path for path, laid in files.items() if laid.get(MADE_FOR) is not None]
        config = parser.parse_args(arguments)
        if len(plans) > 1:
            raise ValueError(f"`--config {plans[0]}` and `--config {plans[1]}` are two plans. Leave one out.")
        for path in plans:
            from . import made_for  # knows all techniques, which most commands don't need

            laid, recipe = files[path], parser.parse_args(without_config(arguments, path))
            planned, trainer = laid.get("trainer") or {}, _section(config).trainer
            # An option on the command line counts more than the plan, and is in batches of the plan's size.
            recounted = [one for one in made_for.COUNT_BATCHES if one in planned and trainer[one] == planned[one]]
            found = made_for.differences(laid[MADE_FOR], made_for.written(plain(parser, recipe)), recounted)
            if found:
                shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
                raise ValueError(
                    f"`--config {path}` was made for another recipe: {shown}. Plan again (`memfit plan`). To train by "
                    f"it all the same, write `{MADE_FOR}: {{}}` in it."
                )
            both, before = (_as_list(_section(parsed).trainer.callbacks) for parsed in (config, recipe))
            trainer.callbacks = made_for.laid_over(both, before, path)
            _section(config)[MADE_FOR] = None  # what is saved of a run is no plan
        return config

    def import_classes(self, arguments: Sequence[str]) -> None:
        """Import the classes that bare names, in arguments and in the files they name, may stand for."""
        import_public_names()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section of a plan's file."""
        parser.add_argument(f"--{MADE_FOR}", type=Any, default=None, help="in the file of a plan: what it was made for")

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it.

        Lightning 2.6 overwrites it with the checkpoint's hyper-parameters here, so that an option given together with
        `--ckpt_path` would be silently ignored.
        """

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer: checkpoints are written whole and checked before they are read."""
        trainer = super().instantiate_trainer(**kwargs)
        if self.subcommand is not None:
            from lightning_memfit.strategies.checkpoint_io import use_atomic_checkpoints

            use_atomic_checkpoints(trainer.strategy)
        return trainer


def _section(config: Namespace) -> Namespace:
    """Return what was parsed for the command that runs, if there is one, or everything."""
    command = config.get("subcommand")
    section: Namespace = config if command is None else config[command]
    return section


def plain(parser: ArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return what was parsed for the command that runs, if there is one, or everything, in values as YAML has them."""
    written: dict[str, Any] = yaml.safe_load(parser.dump(config, skip_link_targets=False))
    command = config.get("subcommand")
    return written if command is None else dict(written[command])


def _check_choices(trainer: Mapping[str, Any]) -> None:
    """Refuse names of accelerators and strategies that Lightning doesn't know."""
    registered = {"accelerator": AcceleratorRegistry, "strategy": StrategyRegistry}
    for option, registry in registered.items():
        value, own = trainer.get(option), {"auto", *(["gpu"] if option == "accelerator" else [])}
        if not isinstance(value, str) or value.lower() in {*own, *registry}:
            continue
        import_public_names()  # which registers ours
        if value.lower() not in {*own, *registry}:
            raise ValueError(f"`trainer.{option}={value}` is not known. {closest(value, {*own, *registry})}")


def _asks_for_help(args: ArgsType) -> bool:
    """Whether arguments have the parser write what classes and their arguments are for."""
    if not isinstance(args, Sequence):
        return False
    # `-h`, `--help`, `--model.help CLASS`, `--print_config=comments`
    return any(one == "-h" or "help" in one or one.startswith("--print_") for one in args)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _try_whole_numbers_first() -> None:
    """Let the parser keep whole numbers as such where a fraction would do: 1 is one batch, 1.0 all of them.

    It tries the types of a union in their order. `typing` gives `Optional[Union[int, float]]` the order in which any
    library of the process wrote it first: that of Lightning's Trainer is `float` first in some commands.
    """
    if isinstance(getattr(_typehints, "sort_subtypes_for_union", None), FunctionType):
        wrap_method(_typehints, "sort_subtypes_for_union", _whole_numbers_first)


def _whole_numbers_first(sort: Callable[..., Sequence[Any]], *arguments: Any) -> list[Any]:
    types = list(sort(*arguments))
    if int in types and float in types[: types.index(int)]:
        types.remove(int)
        types.insert(types.index(float), int)
    return types


def _parser_arguments(run: bool) -> dict[str, Any]:
    """Return arguments for the parsers: usage lines that name what matters instead of every option."""
    options, errors = "[--config RECIPE ...] [--with TECHNIQUE ...] [--KEY VALUE ...]", {"exit_on_error": False}
    if not run:
        return {"usage": f"memfit {options}", **errors}
    return errors | {name: {"usage": f"memfit {name} {options}", **errors} for name in MemFitCLI.subcommands()}
