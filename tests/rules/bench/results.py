"""Results made by hand, for tests of what is done with them."""

from typing import Any

from lightning_memfit.bench.record import SCHEMA, Failure, Memory, Prediction, Result, Speed


def result(
    row: str = "plain", predicted_bytes: int | None = 100, measured_bytes: int | None = 100, **changes: Any
) -> Result:
    predicted = predicted_bytes and Prediction(predicted_bytes, 120, 150, {"parameter": 60}, "forward", 10**9, 0.5)
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": "mine",
        "row": row,
        "title": f"title of {row}",
        "scale": "small",
        "device": "cpu",
        "key": "k",
        "command": f"memfit bench --only {row}",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
        "versions": {"torch": "2.13.0"},
        "hardware": {"device": "cpu", "cores": 2, "machine": "x86_64", "threads": 1, "notes": "quiet"},
        "settings": {"trainer": {"max_steps": 3}},
        "status": "ok",
        "predicted": predicted or None,
        "measured": Memory(measured_bytes, None, {"parameter": 60}, None, None, 10**8),
        "speed": Speed(5, 0.5, 0.4, 0.7, 8.0, 800.0, 0.01),
        "loss_first": 2.0,
        "loss_last": 1.0,
    }
    return Result(**{**figures, **changes})


def out_of_memory(row: str) -> Result:
    error = Failure("OutOfMemoryError", "Tried to allocate 3 MiB")
    return result(row, status="out_of_memory", error=error, speed=None, loss_first=None, loss_last=None)
