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
    """Collect garbage from here on, but never again what the test files and their imports have made.

    Ranks are forked from a server that begins here, before any test has run.
    """
    gc.freeze()
    gc.enable()
    from tests.helpers.ranks import start_server  # imports torch, which reads the variables above

    start_server()


def pytest_sessionfinish() -> None:
    """End the server, which has this process's streams."""
    from tests.helpers.ranks import stop_server

    stop_server()


LAYERS = {"rules": 0.1, "contract": 0.5, "numerics": 0.5, "ranks": 10.0, "commands": 1.0, "truth": 0.5, "nightly": 1.0}
"""Folders of tests, and about how many seconds a test of theirs takes."""

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs nightly, order files by what they take, and skip tests whose device isn't there."""
    import torch

    sampled: set[Path] = set()
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        layer = item.path.relative_to(TESTS).parts[0]
        cases = tuple(case for mark in item.iter_markers("nightly_cases") for case in mark.args)
        if layer == "nightly" or (cases and item.callspec.id.startswith(cases)):
            item.add_marker(pytest.mark.nightly)
        is_sampled = "nightly" in item.keywords and not {"gpu", "timeout"} & set(item.keywords)
        if is_sampled and item.path not in sampled:
            item.add_marker(pytest.mark.nightly_sample)
            sampled.add(item.path)
        seconds[item.path] += LAYERS.get(layer, 1.0)
    # Files go to the workers whole, the longest first: one that comes late keeps one of them busy alone.
    if hasattr(config, "workerinput"):
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


@pytest.fixture(autouse=True, scope="module")
def runs_leave_nothing() -> Iterator[None]:
    """Lightning leaves a run's process group and variables in the process, and the next file would train with them."""
    before = dict(os.environ)
    yield
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
