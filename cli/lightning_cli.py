"""`MemFitCLI`: Lightning's command line with our recipes and errors."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from .explain import explain, import_public_names
from .recipe_files import resolve_arguments

# Lightning 2.6 makes these calls, which jsonargparse 4.5x (pinned below 5) and torch have deprecated.
_DEPRECATED_CALLS = (
    r"\s*By default only one JsonargparseDeprecationWarning",
    r"\s*(``)?(ArgumentParser\.)?(instantiate_classes|add_instantiator|skip_none)",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class MemFitParser(LightningArgumentParser):
    """Parser that explains a mistake in one message instead of listing every option."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the explanation and exit with code 2."""
        if not self.exit_on_error:  # a nested parser, whose error becomes part of an outer one
            super().error(message, ex)
        sys.stderr.write(f"memfit: error: {explain(message, getattr(ex, 'subcommand_parser', None) or self)}\n")
        self.exit(2)


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
        silence_deprecated_calls()
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        super().__init__(
            args=args,
            run=run,
            parser_class=MemFitParser,
            parser_kwargs=_parser_arguments(run),
            auto_configure_optimizers=False,
            **options,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Replace recipe names by their files, then parse."""
        arguments = sys.argv[1:] if args is None else args
        self._arguments: list[str] | None = None
        if isinstance(arguments, Sequence):
            self._arguments = resolve_arguments(arguments)
            self.import_classes(self._arguments)
            self.config = parser.parse_args(self._arguments)
        else:
            import_public_names()
            self.config = parser.parse_object(arguments)

    def import_classes(self, arguments: Sequence[str]) -> None:
        """Import the classes that bare names in these arguments, and in the files they name, may stand for."""
        import_public_names()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option `--memfit`, which plans a run."""
        parser.add_argument(
            "--memfit",
            type=Literal["off", "auto"],
            default="off",
            help="`auto` plans a fit for this device, tries the plan and trains by it, replacing techniques",
        )

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it.

        Lightning 2.6 overwrites it with the checkpoint's hyper-parameters here, so that an option given together with
        `--ckpt_path` would be silently ignored.
        """

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer, with checkpoints that are written whole and checked before they are read."""
        trainer = super().instantiate_trainer(**kwargs)
        if self.subcommand is not None:
            from lightning_memfit.strategies.checkpoint_io import use_atomic_checkpoints

            use_atomic_checkpoints(trainer.strategy)
        return trainer

    @rank_zero_only
    def after_fit(self) -> None:
        """Say where the checkpoint is."""
        callback = self.trainer.checkpoint_callback
        path = getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", "")
        print(f"Checkpoint: {path}" if path else "No checkpoint was written.")


def silence_deprecated_calls() -> None:
    """Hide the warnings about calls that only Lightning can change."""
    for message in _DEPRECATED_CALLS:
        warnings.filterwarnings("ignore", message)


def _parser_arguments(run: bool) -> dict[str, Any]:
    """Return arguments for the parsers: usage lines that name what matters instead of every option."""
    options = "[--config RECIPE ...] [--KEY VALUE ...]"
    if not run:
        return {"usage": f"memfit {options}"}
    return {name: {"usage": f"memfit {name} {options}"} for name in MemFitCLI.subcommands()}
