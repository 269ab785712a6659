"""Measure what a steady step of every technique costs the host: `python -m benchmarks.step_cost.run`.

Some forty seconds on one core. Writes `benchmarks/results/step_cost.json` and the page.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.record import write
from benchmarks.step_cost.rows import ROWS, Row, Side
from benchmarks.step_cost.table import RESULT


def measure(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Every side of every row; one that fails says why."""
    return [{"name": row.name, "sides": [_side(side) for side in (row.ours, *row.peers)]} for row in rows]


def _side(side: Side) -> dict[str, Any]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # monitors print a report
            return {"name": side.name, **vars(side.cost())}
    except Exception as error:
        return {"name": side.name, "failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        sys.setprofile(None)


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Side("warm-up").cost()  # imports, and kernels that are made once
    rows = measure(ROWS)
    write(RESULT, {"rows": rows})
    failed = [(row["name"], side) for row in rows for side in row["sides"] if "failed" in side]
    for name, side in failed:
        print(f"{name}, {side['name']}: {side['failed']}")
    print(f"wrote {RESULT}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
