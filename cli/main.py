"""`memfit`: one command with one file per subcommand, which is imported only when it is called."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from lightning_memfit import __version__

from .errors import DEBUG_OPTION, DEBUG_VARIABLE, INTERRUPTED, original, readable_errors, report_unexpected
from .recipe_files import configs_of, resolve

# Name, module in this folder, description. A module has `main(argv: list[str]) -> int`.
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("fit", "Train a model."),
    "validate": ("fit", "Evaluate a model on the validation data."),
    "test": ("fit", "Evaluate a model on the test data."),
    "predict": ("fit", "Run a model over data."),
    "estimate": ("estimate", "Say how much memory a recipe needs, without the memory."),
    "plan": ("plan", "Find the fastest way to train a recipe on a device, and say why."),
    "bench": ("bench", "Measure techniques one after the other, beside their predictions."),
    "scale": ("scale", "Measure a matrix of processes, sizes and techniques, and report it."),
    "doctor": ("doctor", "Say what this machine has, and what would hinder training."),
    "recipes": ("recipes", "List the recipes that come with the package, or copy one."),
    "export": ("export", "Turn a checkpoint into a Hugging Face folder."),
}

_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn whenever their package is imported: of kernels for other GPUs and Pythons (torchao 0.18), of how
torchao registers its enumerations (torch 2.13), and of kernels that can be downloaded (bitsandbytes 0.50)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments without the program's name; None takes the command line's.

    Returns:
        Exit code: 0 for success, 2 for a user's mistake or an error before anything has begun, which is explained in
        one message, 1 for an error that ended a run. Commands that give a verdict have codes of their own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG_OPTION in arguments or bool(os.environ.get(DEBUG_VARIABLE))
    arguments = [argument for argument in arguments if argument != DEBUG_OPTION]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command = arguments[0]
    if command not in COMMANDS:
        print(f"memfit: error: {_unknown(command)}", file=sys.stderr)
        return 2
    for logger in _NOISY:
        logging.getLogger(logger).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # bars of downloads and of weights are for terminals
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with readable_errors(debug) as outcome, _working_directory_modules():
            # One parser handles all Lightning commands, and reads the command's name itself.
            module, _ = COMMANDS[command]
            rest = arguments if module == "fit" else arguments[1:]
            for name in configs_of(rest) if module in ("fit", "estimate", "plan") else ():
                resolve(name)  # a file that isn't there is told before anything large is imported
            outcome.code = import_module(f".{module}", __package__).main(rest)
        return outcome.code
    except KeyboardInterrupt:  # while something is imported, or traced; `fit` ends by itself once it trains
        if debug:
            raise
        print("memfit: stopped.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not debug:
            return report_unexpected(error)
        unexpected = original(error)
    raise unexpected


@contextmanager
def _working_directory_modules() -> Iterator[None]:
    """Let modules of the working directory be imported, after everything that is installed."""
    folder = os.getcwd()
    if any(os.path.abspath(entry) == folder for entry in sys.path):  # `python -m cli` has it in front
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: memfit COMMAND [options]",
            "",
            "Give it any LightningModule and any machine, and it makes training fit.",
            "",
            "commands:",
            *lines,
            "",
            "`memfit COMMAND --help` lists a command's options. Start with `memfit fit --config quickstart`.",
            f"`{DEBUG_OPTION}` shows the traceback of an error instead of one message.",
        ]
    )


def _unknown(command: str) -> str:
    from difflib import get_close_matches

    closest = get_close_matches(command, COMMANDS, n=3) or list(COMMANDS)
    return f"there is no command {command!r}. Closest: {', '.join(closest)}."
