"""The sweeps of `benchmarks/techniques_sweep`: their judge tells right from wrong, and a sample of both is clean."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from benchmarks.techniques_sweep import tiny
from benchmarks.techniques_sweep.adapters import ByHand, rounded
from benchmarks.techniques_sweep.architectures import TOLERANCE, Tried, examine, judged
from benchmarks.techniques_sweep.combinations import examine as combine
from benchmarks.techniques_sweep.runs import Trained, difference, is_refusal, was_refused
from lightning_memfit.techniques.core.technique import TOLERANCES, Numerics

FAST = ("ChunkedLoss", "Lora", "QuantizedWeights, 8 bits", "ActivationCheckpointing, full")
ARCHITECTURES = ("llama", "gpt2", "gemma2", "mpt", "mamba2", "qwen3_moe")
SEEDS = (0, 3, 8, 15, 19, 20, 63, 158, 246)
"""Quick ones, those among them that found mistakes."""


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES if name != "gpt2")]
)
def test_equal_or_refused(name: str) -> None:
    row = examine(name, FAST)
    assert {one["verdict"] for one in row["verdicts"].values()} <= {"equal", "refused"}, row


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["falcon", "cohere2", "t5"])
def test_budget_holds_where_forward_has_the_peak(name: str) -> None:
    """Weights and old gradients are most of it, so that what is tried again in forward must not come on top."""
    row = examine(name, ("ActivationCheckpointing, budget",))
    assert row["verdicts"]["ActivationCheckpointing, budget"]["verdict"] == "equal", row


@pytest.mark.parametrize("seed", SEEDS)
def test_combination_is_equal_or_refused_in_the_same_words(seed: int) -> None:
    row = combine(seed)
    assert row["verdict"] in ("equal", "refused", "refused on the batch"), row


def test_rounding_of_the_promised_run_itself_is_allowed() -> None:
    """Seed 999 cuts batches of 8 into 3, 3 and 2: another order of additions, which three steps of AdamW magnify."""
    row = combine(999)
    assert row["verdict"] == "equal"
    assert TOLERANCES["exact"] <= row["tolerance"] < 10 * TOLERANCES["exact"]


def test_what_precision_converts_is_not_a_change() -> None:
    weight = {"w": torch.tensor([1 / 3])}
    half = {"w": weight["w"].bfloat16()}
    run = Trained(before=weight, after=half, error=MisconfigurationException("no"))
    assert not was_refused(run)
    run.dtype = torch.bfloat16
    assert was_refused(run)
    run.after = {"w": half["w"] * 2}
    assert not was_refused(run)


def test_every_kind_of_numerics_has_a_tolerance() -> None:
    assert set(TOLERANCES) == set(Numerics.__args__)


# --- the judge ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried() -> Tried:
    return Tried("gpt2")


class Changing(pl.Callback):
    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.what == "early":
            pl_module.model.lm_head.weight.data.mul_(1.01)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "labels" and batch_idx == 1:
            batch["labels"][0, 1] = 30
        if self.what == "late" and batch_idx == 1:
            raise ValueError("too late")
        if self.what == "error":
            raise ValueError("not one of ours")


@pytest.mark.parametrize(
    ("what", "verdict"), [("", "equal"), ("early", "different"), ("labels", "different"), ("late", "crashed"),
                          ("error", "crashed")]
)  # fmt: skip
def test_verdicts(tried: Tried, what: str, verdict: str) -> None:
    tried.data = type(tried.data)(tried.data.batches[0])  # fresh batches, as one test changes them
    assert judged(tried.plain, tried.run(Changing(what)), TOLERANCE)["verdict"] == verdict


def test_only_errors_raised_on_purpose_are_refusals() -> None:
    from lightning_memfit.memory import parse_bytes

    for call, refused in ((lambda: parse_bytes("many", "limit"), True), (lambda: int("many"), False)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        assert is_refusal(caught.value) is refused
    assert not is_refusal(None)


def test_differences_are_relative_to_how_far_weights_moved() -> None:
    before, after = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.001])}
    expected = Trained([1.0], before, after)
    found = Trained([1.0], before, {"w": torch.tensor([1.0, 2.0005])})
    assert difference(expected, found).weights == pytest.approx(0.5, rel=0.01)
    assert difference(expected, expected).weights == 0
    assert difference(expected, Trained([1.0], before, {"other": after["w"]})).weights == float("inf")
    assert difference(expected, Trained([float("nan")], before, after)).losses == float("inf")


# --- the references -------------------------------------------------------------------------------------------------


def test_adapters_by_hand_are_what_merging_them_gives() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    module = nn.ModuleDict({"layer": layer})
    a, b = torch.randn(2, 6), torch.randn(5, 2)
    by_hand = ByHand(module, {"layer": (a, b, 0.5, None)})
    weight = by_hand.merged()["layer.weight"]
    torch.testing.assert_close(layer(x), x @ weight.t() + layer.bias)
    assert sum(p.requires_grad for p in module.parameters()) == 2


@pytest.mark.parametrize(("bits", "bound"), [(8, 1 / 254), (4, 0.16)])
def test_rounding_by_hand(bits: int, bound: float) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    apart = (rounded(weight, bits) - weight).abs().amax(1) / weight.abs().amax(1)
    assert 0 < float(apart.max()) <= bound * 1.1


# --- the machinery --------------------------------------------------------------------------------------------------


def test_what_cannot_be_built_says_why() -> None:
    row = examine("gemma3n", ())
    assert row["not_built"] or row["verdicts"] == {}
    with pytest.raises(tiny.NotBuilt):
        tiny.build("nothing of this name")
