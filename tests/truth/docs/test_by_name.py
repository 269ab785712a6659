"""Everything that the table of known names tells users to type exists."""

import ast
import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_memfit
import lightning_memfit.strategies  # registers their names
from cli.main import COMMANDS
from lightning_memfit.techniques.core.registry import TECHNIQUES, find_technique

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/techniques/by_name.md").read_text().splitlines()
    if line.startswith("| ")
][1:]
TYPED = sorted({code for _, typed, _ in ROWS for code in re.findall("`([^`]+)`", typed)})


def test_each_row_says_what_to_type_or_what_does_it_instead() -> None:
    assert len(ROWS) > 35
    assert [name for name, typed, instead in ROWS if not (typed or instead)] == []


@pytest.mark.parametrize("code", TYPED)
def test_what_is_typed_exists(code: str) -> None:
    name = code.rpartition(" ")[2]
    if code.startswith("--with "):
        assert find_technique(name)
    elif code.startswith("memfit "):
        assert name in COMMANDS
    elif code.startswith("trainer."):
        assert code.partition(".")[2] in inspect.signature(pl.Trainer).parameters
    elif code.startswith("memfit_"):
        assert code in StrategyRegistry
    elif "(" in code:
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        made = getattr(lightning_memfit, ast.unparse(call.func))
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        inspect.signature(made).bind_partial(**given)
        if made is lightning_memfit.ActivationCheckpointing:
            made(**given)
    else:
        assert (ROOT / f"recipes/{code}.yaml").exists()


def test_every_technique_has_a_row() -> None:
    assert {technique.name for technique in TECHNIQUES} <= {code.removeprefix("--with ") for code in TYPED}
