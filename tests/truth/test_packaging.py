"""What a wheel holds and claims."""

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_package_list_is_complete(project: dict) -> None:
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "lightning_memfit").rglob("__init__.py")
    } | {
        ".".join(("lightning_memfit", *path.parent.relative_to(ROOT).parts))
        for folder, kind in (("cli", "__init__.py"), ("recipes", "*.yaml"))
        for path in (ROOT / folder).rglob(kind)
    }
    found |= {
        ".".join(("lightning_memfit", *path.parent.relative_to(ROOT / "benchmarks").parts))
        for path in (ROOT / "benchmarks" / "experiments").rglob("*.yaml")
    }
    assert listed == found


def test_no_top_level_module_but_ours(project: dict) -> None:
    assert all(name.split(".")[0] == "lightning_memfit" for name in project["tool"]["setuptools"]["packages"])
    assert project["project"]["scripts"]["memfit"].startswith("lightning_memfit.cli")


def test_recipes_are_package_data(project: dict) -> None:
    assert "*.yaml" in project["tool"]["setuptools"]["package-data"]["*"]
