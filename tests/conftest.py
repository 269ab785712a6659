"""Settings every test runs under: offline, quiet, and with caches that leave nothing behind."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ranks are forked from the process of the tests without the threads that it has, and would wait for them for ever. And
# threads of several workers on the same cores wait for each other, twenty times longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run and machine, in a second or two per test; nothing is written into the checkout.
settings.register_profile("memfit", derandomize=True, max_examples=60, deadline=None, database=None)
settings.load_profile("memfit")


@pytest.fixture(autouse=True, scope="session")
def memfit_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles are cached in a folder of this session, not in the home of whoever runs the tests."""
    folder = tmp_path_factory.mktemp("memfit-cache")
    before = os.environ.get("MEMFIT_CACHE")
    os.environ["MEMFIT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["MEMFIT_CACHE"]
    else:
        os.environ["MEMFIT_CACHE"] = before


def pytest_sessionstart() -> None:
    """Collect no garbage while test files are imported, which took a third of that time: almost all of it stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never again what the test files and their imports have made."""
    gc.freeze()
    gc.enable()


INTEGRATION = Path(__file__).parent / "integration"
_LINES = (Path(__file__).parent / "exhaustive.txt").read_text().splitlines()
EXHAUSTIVE = tuple(line for line in _LINES if not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow or exhaustive, order files by what they take, and skip tests whose device isn't there."""
    import torch

    sampled: set[Path] = set()
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(EXHAUSTIVE):
            item.add_marker(pytest.mark.exhaustive)
            if item.path not in sampled and "gpu" not in item.keywords:
                item.add_marker(pytest.mark.exhaustive_sample)
                sampled.add(item.path)
    # Files go to the workers whole, the longest first: one that comes late keeps one of them busy alone.
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += 10 if "slow" in item.keywords else 2 if "medium" in item.keywords else 0.1
    items.sort(key=lambda item: (-seconds[item.path], item.path))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_garbage() -> None:
    """Leave what imports have made out of garbage collections: walking it took half the time of tests of recovery.

    Before every file, as many libraries are imported by what the tests before it did.
    """
    gc.collect()
    gc.freeze()
