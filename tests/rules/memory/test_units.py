"""Sizes as people write them: what is written is read back, whatever the unit."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.memory.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_percent,
    format_seconds,
    in_json,
    parse_bytes,
    unit_of_column,
    unit_of_seconds,
)

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB}
UNITS["TiB"] = TIB
PADDING = st.text(" \t", max_size=3)


@given(st.integers(1, 1 << 50))
def test_a_formatted_size_is_parsed_to_within_half_its_last_digit(size):
    text = format_bytes(size)
    number, unit = text.split()
    tolerance = 0 if unit == "B" else 0.005 * UNITS[unit] + 1
    assert abs(parse_bytes(text) - size) <= tolerance
    assert float(number) >= 1


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)), PADDING, PADDING, PADDING, st.randoms())
def test_whole_numbers_of_any_unit_are_exact_whatever_the_case_and_the_spaces(
    number, unit, before, between, after, chance
):
    text = "".join(chance.choice((letter.lower(), letter.upper())) for letter in unit)
    assert parse_bytes(f"{before}{number}{between}{text}{after}") == number * UNITS[unit]


@given(st.integers(1, 10**6), st.integers(1, 3), st.sampled_from(["kB", "MB", "KiB", "GiB"]))
def test_decimals_are_not_a_byte_short(digits, places, unit):
    exact = Fraction(digits, 10**places) * UNITS[unit]
    assert parse_bytes(f"{digits / 10**places:.{places}f} {unit}") == math.floor(exact)


@given(
    st.one_of(
        st.text(max_size=12), st.integers(max_value=0), st.floats(), st.integers(1 << 60), st.booleans(), st.none()
    )
)
def test_whatever_is_written_is_a_positive_size_or_refused_by_name(value):
    try:
        size: object = parse_bytes(value, "limit")
    except ValueError as error:
        size = str(error)
    assert size.startswith(f"`limit={value!r}`") if isinstance(size, str) else 0 < size < 1 << 63


@pytest.mark.parametrize("value", ["0", "0.2 B", "-3MiB", "3 GBit", "1e", "", "nan", math.nan, math.inf, "1e400", True])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ValueError, match="`size="):
        parse_bytes(value)


def test_percentages_have_a_sign_and_no_negative_zero():
    assert [format_percent(share) for share in (0.0025, -0.1, -1e-9)] == ["+0.25 %", "-10.00 %", "+0.00 %"]


def test_a_column_has_the_unit_of_its_largest_size():
    columns = [[], [3 * KIB, 0], [4 * MIB, 12], [4 * GIB - 1, -5], [-4 * GIB, 1], [900 * GIB]]
    assert [unit_of_column(sizes)[0] for sizes in columns] == ["KiB", "KiB", "MiB", "MiB", "GiB", "GiB"]
    assert unit_of_column(iter([5 * MIB])) == ("MiB", MIB)


def test_short_times_are_in_milliseconds():
    assert [format_seconds(seconds) for seconds in (1.254, 0.0312, 0.0)] == ["1.25 s", "31.20 ms", "0.00 ms"]
    assert unit_of_seconds([-2.0, 0.1]) == ("s", 1.0)
    assert unit_of_seconds([]) == ("ms", 1e-3)


def test_numbers_that_json_lacks_are_strings_which_float_takes_back():
    data = {"loss": math.nan, "nested": {"of": [-math.inf, (math.inf, 1.5)], "none": None}, "name": "NaN", "n": 3}
    written = json.dumps(in_json(data), allow_nan=False)
    plain = {"of": ["-Infinity", ["Infinity", 1.5]], "none": None}
    assert json.loads(written) == {"loss": "NaN", "nested": plain, "name": "NaN", "n": 3}
    assert math.isnan(float("NaN"))
    assert [float(text) for text in ("Infinity", "-Infinity")] == [math.inf, -math.inf]
