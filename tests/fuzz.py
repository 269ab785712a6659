"""Mutated recipes and command lines, with fixed seeds: every mistake ends in one message, quickly, and leaves nothing.

`python -m tests.fuzz` runs all 300 in this process and prints a line for each that broke a promise;
`tests/commands/cli/test_fuzz.py` runs a sample of them.
"""

import argparse
import contextlib
import copy
import io
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# Imported here, so that their time is no case's, and Lightning's log handler doesn't hold the stderr of one.
import cli.estimate_recipe
import cli.fit
import cli.main

NUM_CASES = 300
MOST_SECONDS = 10.0
"""Of processor time; a test of a hang is the time limit around it."""

RECIPE: dict[str, Any] = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_memfit.models.CausalLM",
        "init_args": {
            "config": {
                "model_type": "gpt2",
                "n_layer": 1,
                "n_embd": 8,
                "n_head": 2,
                "vocab_size": 258,
                "n_positions": 64,
            },
            "learning_rate": 1e-3,
            "warmup_steps": 1,
        },
    },
    "data": {
        "class_path": "lightning_memfit.data.StandardLibraryText",
        "init_args": {"max_files": 4, "sequence_length": 16, "batch_size": 4, "val_fraction": 0.3, "num_workers": 0},
    },
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "max_steps": 2,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "runs", "name": "fuzz"},
        },
        "callbacks": [
            {"class_path": "lightning_memfit.MicroBatching", "init_args": {"micro_batch_size": 2}},
            {"class_path": "lightning_memfit.device.limit.MemoryLimit", "init_args": {"limit": "1GiB"}},
            {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": "{step}"}},
        ],
    },
}

_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, -3, 10**30, 0.5, -2.5, float("nan"), float("inf"), "", " ", "no", "nan",
    "1e400GiB", "12 parsecs", "x" * 5000, "ünïcode \u202e", "../../etc/passwd", "{step", "[1, 2", [], {},
    [[]], [None], [1, "two"], {"a": {}}, {"class_path": "os.system"},
    {"class_path": "nosuch.Thing", "init_args": {}}, {"init_args": {"x": 1}},
)  # fmt: skip

_HEAVY = {"devices", "num_nodes", "num_workers", "max_time"}
"""Keys with which a correct value may start processes, or wait for other machines; they get wrong values only."""
_WRONG: tuple[Any, ...] = (-3, "two", [], {}, "", [[]], {"a": 1}, float("nan"))

_OPTIONS = """
--trainer.max_stepz=1
--trainer.precision=33
--trainer.strategy=none
--trainer.devices=[0,3]
--model=Nothing
--model.learning_rate=-1
--model.learning_rate=nan
--data.sequence_length=1
--data.batch_size=0
--data=3
--trainer.callbacks=[
--trainer.callbacks+=Nothing
--trainer.logger=false
--ckpt_path=none.ckpt
--seed_everything=x
--config=nosuch
--config=.
--
-x
--trainer
stray
--trainer.accumulate_grad_batches=0
--trainer.gradient_clip_val=nan
--trainer.accelerator=abacus
--trainer.val_check_interval=-1
--trainer.limit_train_batches=2.5
""".strip().splitlines()

_LINES = """
plan --device= --config=CONFIG
plan --device=0GiB --config=CONFIG
plan --allow=magic --config=CONFIG
plan --host-memory=-1 --config=CONFIG
plan --out=/nosuch/x.yaml --config=CONFIG --device=1GiB
plan
plan --config
estimate
estimate --model=nothing
estimate --model=gpt2 --micro-batch-size=0
estimate --config=CONFIG --device=x
estimate --config=CONFIG --micro-batch-size=x
generate
export --ckpt_path=CONFIG --folder=out
export --ckpt_path=none --folder=out
export
doctor --folder=/nosuch
recipes copy nothing
recipes burn
bench --experiment=nothing
scale --config=CONFIG
scale --config=none
explain
FIT
''
fit --help=x
test --config=CONFIG --ckpt_path=CONFIG
predict --config=CONFIG --return_predictions=x
validate --config=CONFIG --verbose=x
""".strip().splitlines()


_SHORT = {
    "fit": ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2"),
    "validate": ("--trainer.limit_val_batches=1",),
    "test": ("--trainer.limit_test_batches=1",),
}
"""What keeps a recipe that is still right from training for hours."""


@dataclass
class Case:
    """One command line with the recipe that it names."""

    number: int
    content: bytes
    arguments: list[str]
    marker: str = "payload-ran"
    """Name of a file that a payload in the recipe would make."""
    broken: list[str] = field(default_factory=list)
    """Promises that it broke."""
    code: int | None = None
    seconds: float = 0.0


def make_case(number: int) -> Case:
    """Make a case; the same number gives the same one everywhere."""
    draw = random.Random(number)
    command = draw.choice(["fit", "fit", "fit", "estimate", "validate", "test"])
    arguments = [command, "--config=CONFIG", *_SHORT.get(command, ())]
    if number % 6 == 5:
        return Case(number, _text(RECIPE), shlex.split(draw.choice(_LINES)))
    if number % 6 == 4:
        chosen = draw.sample(_OPTIONS, draw.choice([1, 1, 2]))
        return Case(number, _text(RECIPE), [command, *_shuffled(draw, [*arguments[1:], *chosen])])
    if number % 6 == 3:
        return Case(number, _damaged(draw, _text(RECIPE)), arguments)
    recipe = copy.deepcopy(RECIPE)
    for _ in range(draw.choice([1, 1, 1, 2])):
        draw.choice(_MUTATIONS)(draw, recipe)
    return Case(number, _text(recipe), arguments)


def run_case(case: Case, folder: Path) -> Case:
    """Run a case in this process, in an empty folder, and note what it broke."""
    (folder / "recipe.yaml").write_bytes(case.content)
    arguments = [argument.replace("CONFIG", "recipe.yaml") for argument in case.arguments]
    output, errors = io.StringIO(), io.StringIO()
    started = time.process_time()
    with contextlib.chdir(folder) if sys.version_info >= (3, 11) else _inside(folder):
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                case.code = cli.main.main(arguments)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            case.broken.append(f"raised {type(error).__name__}: {error}")
            errors.write("".join(traceback.format_exception(error)))
    case.seconds = time.process_time() - started
    told = errors.getvalue()
    if "Traceback (most recent call last)" in told + output.getvalue():
        case.broken.append("printed a traceback")
    if case.seconds > MOST_SECONDS:
        case.broken.append(f"took {case.seconds:.1f} s")
    if (folder / case.marker).exists():
        case.broken.append("ran a payload")
    if case.code not in (0, 1, 2) or (case.code == 1 and arguments[0] not in ("plan", "estimate", "doctor")):
        case.broken.append(f"ended with exit code {case.code}")
    if case.code == 2 and "memfit: " not in told and "usage: " not in told:
        case.broken.append("said nothing")
    return case


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- mutations --------------------------------------------------------------------------------------------------------


def _text(recipe: dict[str, Any]) -> bytes:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()


def _shuffled(draw: random.Random, values: list[str]) -> list[str]:
    draw.shuffle(values)
    return values


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a recipe: a mapping or list, and a key or index of it."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _place(draw: random.Random, recipe: dict[str, Any]) -> tuple[Any, Any]:
    return draw.choice(list(_places(recipe)))


def _replace(draw: random.Random, recipe: dict[str, Any]) -> None:
    holder, key = _place(draw, recipe)
    holder[key] = copy.deepcopy(draw.choice(_WRONG if key in _HEAVY else _VALUES))


def _remove(draw: random.Random, recipe: dict[str, Any]) -> None:
    holder, key = _place(draw, recipe)
    del holder[key]


def _misspell(draw: random.Random, recipe: dict[str, Any]) -> None:
    holder, key = draw.choice([(holder, key) for holder, key in _places(recipe) if isinstance(holder, dict)])
    at = draw.randrange(len(key))
    value = holder.pop(key)
    holder[key[:at] + draw.choice(["", "x", "_", key[at].upper()]) + key[at + 1 :]] = draw.choice([value, value, {}])


def _insert(draw: random.Random, recipe: dict[str, Any]) -> None:
    holder, _ = draw.choice([(holder, key) for holder, key in _places(recipe) if isinstance(holder, dict)])
    holder[draw.choice(["trainr", "extra", "class_path", "init_args", "callbacks+", "7"])] = copy.deepcopy(
        draw.choice(_VALUES)
    )


def _swap(draw: random.Random, recipe: dict[str, Any]) -> None:
    (first, a), (second, b) = _place(draw, recipe), _place(draw, recipe)
    if {a, b} & _HEAVY or first is second[b] or second is first[a]:
        return
    first[a], second[b] = copy.deepcopy(second[b]), copy.deepcopy(first[a])


def _repeat(draw: random.Random, recipe: dict[str, Any]) -> None:
    callbacks = recipe["trainer"].get("callbacks")
    if isinstance(callbacks, list) and callbacks:
        callbacks.append(copy.deepcopy(draw.choice(callbacks)))


_MUTATIONS: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    _replace, _replace, _replace, _remove, _misspell, _insert, _swap, _repeat,
)  # fmt: skip


def _damaged(draw: random.Random, text: bytes) -> bytes:
    """Return the text of a recipe with damage that no mapping could have."""
    at = draw.randrange(1, len(text))
    lines = text.splitlines(keepends=True)
    line = draw.randrange(len(lines))
    seed = b"seed_everything: 1"
    return draw.choice(
        [
            lambda: text[:at],
            lambda: text[:at] + bytes([draw.randrange(128, 256)]) + text[at:],
            lambda: text[:at] + bytes([draw.randrange(256)]) * 3 + text[at + 3 :],
            lambda: b"".join([*lines[:line], b"\t", *lines[line:]]),
            lambda: b"".join([*lines[:line], lines[line], *lines[line:]]),
            lambda: text.replace(seed, seed[:-1] + b"!!python/object/apply:os.system [touch payload-ran]"),
            lambda: text.replace(seed, b"model: !!python/name:os.system"),
            lambda: b"\x00" + text,
            lambda: b"",
            lambda: b"# nothing\n",
            lambda: b"- " + text,
            lambda: text.replace(b": ", b":"),
            lambda: text * 2,
        ]
    )()  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


def run_all(numbers: range, report: Callable[[Case], None]) -> list[Case]:
    """Run cases, each in a folder of its own, and return those that broke a promise."""
    broken = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="memfit-fuzz-") as folder:
            case = run_case(make_case(number), Path(folder))
        report(case)
        if case.broken:
            broken.append(case)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    arguments = parser.parse_args()
    codes: dict[int | None, int] = {}
    slowest = 0.0

    def report(case: Case) -> None:
        nonlocal slowest
        codes[case.code] = codes.get(case.code, 0) + 1
        slowest = max(slowest, case.seconds)
        if case.broken:
            print(f"case {case.number} ({' '.join(case.arguments)}): {'; '.join(case.broken)}", flush=True)

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMFIT_CACHE"] = cache
        broken = run_all(range(arguments.first, arguments.first + arguments.cases), report)
    ended = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items(), key=str))
    print(f"{arguments.cases} cases ended: {ended}; the slowest took {slowest:.1f} s; {len(broken)} broke a promise.")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
