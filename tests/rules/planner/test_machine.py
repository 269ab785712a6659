import pytest

from lightning_memfit.planner.workload import parse_device_count


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("8x A100 80GB", (8, "A100 80GB")),
        ("2x24GiB", (2, "24GiB")),
        ("2 X RTX 3090", (2, "RTX 3090")),
        ("RTX 3060", (None, "RTX 3060")),
        ("12GiB", (None, "12GiB")),
    ],
)
def test_a_name_may_say_how_many(name: str, found: tuple[int | None, str]) -> None:
    assert parse_device_count(name) == found


def test_none_is_no_number_of_devices() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        parse_device_count("0x 24GiB")
