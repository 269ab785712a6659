"""Upstream's private names that the package uses are where the package expects them."""

import ast
import re

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.upstream_names import HEADING, NAMES, PAGE, VERSIONS, exists, own_sources, page, paths, used_names

ONLY_WITH_CUDA = {"torch._C._cuda_clearCublasWorkspaces", "torch._C._cuda_isHistoryEnabled"}
WITH_NEXT_PASS = {"torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"}
"""Asked for where FSDP2 can forget a pass only (`FSDPModule.reset_iter_state`, torch 2.13)."""


def test_every_name_is_known() -> None:
    missing = {name: sorted(files) for name, files in used_names().items() if "." not in name and name not in NAMES}
    assert not missing, "say in `NAMES` of tests/upstream_names.py which class or module they belong to"


def test_no_name_is_listed_that_is_not_used() -> None:
    words = set(re.findall(r"\w+", "\n".join(map(ast.unparse, own_sources().values()))))
    assert not set(NAMES) - words


# Of the page, as finding what the package uses takes seconds in every worker; `test_the_page_lists_them` compares both.
LISTED = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("path", sorted(LISTED))
def test_name_is_where_it_was(path: str) -> None:
    if path in ONLY_WITH_CUDA and not torch.cuda.is_available():
        pytest.skip("only torch with CUDA has it")
    if path in WITH_NEXT_PASS and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("FSDP2 of this torch can't forget a pass, so that nobody asks")
    library = path.partition(".")[0]
    if library in VERSIONS:
        pytest.importorskip(library)
    assert exists(path), f"`{path}` has moved: written for {library} {VERSIONS.get(library, '')}"


def test_a_name_that_moved_is_noticed() -> None:
    assert not exists("torch.nn.Module._no_such_name")
    assert not exists("torch.optim.lr_scheduler._no_such_name")
    with pytest.raises(AttributeError):
        exists("torch.no_such_module._name")


def test_the_page_lists_them() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.upstream_names`"
    assert all(f"`{path}`" in PAGE.read_text() for path in paths())
