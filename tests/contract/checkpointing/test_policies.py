import pytest

from lightning_memfit.checkpointing.policies import choices_for


def test_modes():
    assert choices_for("none", 2) == ("none", "none")
    assert choices_for("full", 2) == ("full", "full")
    assert choices_for("every", 5, every=2) == ("full", "none", "full", "none", "full")
    assert choices_for("selective", 1, keep=("matmul",)) == ("keep_matmul",)
    assert choices_for("selective", 1, keep=("attention",)) == ("keep_attention",)
    assert choices_for("selective", 1, keep=("attention", "matmul")) == ("keep_matmul_attention",)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mode": "ful"}, "mode='ful'"),
        ({"mode": "every"}, "every=None"),
        ({"mode": "every", "every": 0}, "every=0"),
        ({"mode": "full", "every": 2}, "every=2"),
        ({"mode": "selective"}, r"keep=\[\]"),
        ({"mode": "full", "keep": ("matmul",)}, "keep="),
        ({"mode": "selective", "keep": ("mm",)}, "'attention', 'matmul'"),
    ],
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        choices_for(num_blocks=2, **kwargs)
