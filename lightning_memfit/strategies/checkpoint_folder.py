"""Rewriting a checkpoint folder without ever being left with half of one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def rewritten(path: str | Path, is_writer: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Give a folder beside `path` to write to, which takes its place once everything is written.

    All ranks enter and leave together. An earlier checkpoint at `path` is there until then; a run that dies in between
    leaves it, and a folder `<path>.partial`, which the next save replaces.

    Args:
        path: Where the checkpoint is to be.
        is_writer: Whether this rank moves folders: one per machine.
        barrier: Waits for all ranks.

    Raises:
        FileExistsError: If something else than a DeepSpeed checkpoint is at `path`.
    """
    target = Path(path)
    partial, former = (target.with_name(f"{target.name}.{suffix}") for suffix in ("partial", "former"))
    if target.exists() and not (target / "latest").is_file():
        raise FileExistsError(f"{str(target)!r} is not a DeepSpeed checkpoint, and is not overwritten. Name another.")
    barrier()  # nobody writes before all have looked
    if is_writer:
        _remove(partial)
    barrier()
    yield partial
    barrier()
    if is_writer and partial.exists():  # another machine may share the folder and have been faster
        _remove(former)
        if target.exists():
            target.rename(former)
        partial.rename(target)
        _remove(former)
    barrier()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
