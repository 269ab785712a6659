"""Upstream's private names that the package uses are where the package expects them."""

import ast
import re

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.upstream_names import NAMES, VERSIONS, exists, library_of, own_sources, paths, tables, used_names

ONLY_WITH_CUDA = {"torch._C._cuda_clearCublasWorkspaces", "torch._C._cuda_isHistoryEnabled"}
WITH_NEXT_PASS = {"torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"}
"""Asked for where FSDP2 can forget a pass only (`FSDPModule.reset_iter_state`, torch 2.13)."""


def test_every_name_is_known() -> None:
    missing = {name: sorted(files) for name, files in used_names().items() if "." not in name and name not in NAMES}
    assert not missing, "say in `NAMES` of tests/upstream_names.py which class or module they belong to"


def test_no_name_is_listed_that_is_not_used() -> None:
    words = set(re.findall(r"\w+", "\n".join(map(ast.unparse, own_sources().values()))))
    assert not set(NAMES) - words


@pytest.mark.parametrize("library", sorted(VERSIONS))
def test_names_are_where_they_were(library: str) -> None:
    if library != "python":
        pytest.importorskip(library)
    not_here = set() if torch.cuda.is_available() else set(ONLY_WITH_CUDA)
    if not hasattr(FSDPModule, "reset_iter_state"):
        not_here |= WITH_NEXT_PASS
    moved = [path for path in paths() if library_of(path) == library and path not in not_here and not _found(path)]
    assert not moved, f"written for {library} {VERSIONS[library]}"


def _found(path: str) -> bool:
    try:
        return exists(path)
    except (AttributeError, ModuleNotFoundError):  # its class or module has moved
        return False


def test_a_name_that_moved_is_noticed() -> None:
    assert not exists("torch.nn.Module._no_such_name")
    assert not exists("torch.optim.lr_scheduler._no_such_name")
    with pytest.raises(AttributeError):
        exists("torch.no_such_module._name")


def test_the_tables_list_them() -> None:
    printed = tables()
    assert [path for path in paths() if f"| `{path}` |" not in printed] == []
