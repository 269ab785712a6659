"""Parse and format bytes as people write and read them. The package computes in integers.

It prints binary units that suit the size, in a column of a table one for all. And numbers as JSON has them.
"""

import math
import re
from collections.abc import Iterable
from decimal import Decimal, DecimalException
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_TOO_LARGE = 1 << 63

_BINARY = {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str, argument: str = "size") -> int:
    """Turn `12GiB`, `12 GB`, `1.5e9` or a number of bytes into an integer.

    Binary suffixes (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (kB, MB, GB, TB) powers of 1000.

    Args:
        value: What the user wrote.
        argument: Name used in the error message.

    Raises:
        ValueError: If the value is not a positive size.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text: int | float | str = value
        unit = ""
    else:
        match = _PATTERN.fullmatch(str(value))
        if match is None:
            raise ValueError(f"`{argument}={value!r}` is not a size. Write for example 12GiB, 500MiB or 12e9.")
        text, unit = match[1], match[2].lower()  # a float times 1000 is a byte short for 8.2 kB
    scale = {"": 1, **_DECIMAL, **_BINARY}.get(unit)
    if scale is None:
        known = "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise ValueError(f"`{argument}={value!r}` has the unknown unit {unit!r}. Use {known}.")
    try:
        size = Decimal(text) * scale
        is_size = not size.is_nan() and 1 <= size < _TOO_LARGE
    except DecimalException:  # more digits in the exponent than a Decimal has
        is_size = False
    if not is_size:
        raise ValueError(f"`{argument}={value!r}` must be a positive size, of less than 8 EiB.")
    return int(size)


def format_percent(share: float) -> str:
    """Format a share with its sign, in percent with two decimals, without a minus before zero: `+0.25 %`."""
    return f"{round(100 * share, 2) + 0.0:+.2f} %"


def format_bytes(size_bytes: int) -> str:
    """Format bytes in the largest binary unit that keeps at least one digit before the point: `3.72 GiB`."""
    magnitude = abs(size_bytes)
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} B"


def unit_of_column(sizes: Iterable[int]) -> tuple[str, int]:
    """Return name and bytes of one unit for a column of sizes: GiB from 4 GiB on, MiB from 4 MiB on, or KiB.

    Args:
        sizes: Bytes, which the largest of decides.
    """
    largest = max(map(abs, sizes), default=0)
    return next(
        (name, unit) for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if largest >= 4 * unit or unit == KIB
    )


def format_seconds(seconds: float) -> str:
    """Format seconds with two decimals, those below one as milliseconds: `1.25 s`, `31.20 ms`."""
    name, unit = unit_of_seconds([seconds])
    return f"{seconds / unit:.2f} {name}"


def unit_of_seconds(times: Iterable[float]) -> tuple[str, float]:
    """Return name and seconds of one unit for a column of times: seconds if one of them is that long, or ms."""
    return ("s", 1.0) if max(map(abs, times), default=0.0) >= 1.0 else ("ms", 1e-3)


def in_json(data: dict[str, Any]) -> dict[str, Any]:
    """Return plain data with floats that JSON doesn't have as the strings `NaN`, `Infinity` and `-Infinity`.

    Python would write them bare, which other readers refuse. `float` takes the strings back.

    Args:
        data: Dictionaries, lists, tuples, strings and numbers.
    """
    written: dict[str, Any] = _in_json(data)
    return written


def _in_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    return [_in_json(item) for item in value] if isinstance(value, (list, tuple)) else value
