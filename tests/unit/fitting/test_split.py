"""Cutting batches of any nesting, and what each part weighs in the loss."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.fitting.step.split import BatchSplitter, predicts_next_token, sizes_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


def test_sizes() -> None:
    assert sizes_of(16, 16) == [16]
    assert sizes_of(10, 4) == [4, 4, 2]
    assert sizes_of(3, 8) == [3]


def test_any_nesting_is_split_and_the_rest_passed_whole() -> None:
    weights = torch.ones(3)
    batch = {
        "ids": rows(5, 7),
        "pair": Pair(rows(5), [rows(5, 2), {"deep": (rows(5),)}]),
        "record": Record(rows(5), "train"),
        "array": numpy.arange(5),
        "names": ["a", "b", "c", "d", "e"],
        "weights": weights,
        "scalar": torch.tensor(3.0),
        "flag": True,
        "nothing": None,
    }
    first, second = BatchSplitter().split(batch, [3, 2])
    assert first["ids"].shape == (3, 7)
    assert second["ids"][:, 0].tolist() == [3, 4]
    assert isinstance(first["pair"], Pair)
    assert second["pair"].y[1]["deep"][0].tolist() == [3, 4]
    assert second["record"] == Record(second["record"].x, "train")
    assert second["record"].x.tolist() == [3, 4]
    assert second["array"].tolist() == [3, 4]
    assert second["names"] == ["d", "e"]
    assert first["weights"] is weights
    assert first["flag"] is True
    assert batch["ids"].shape == (5, 7)


def test_splitting_does_not_copy() -> None:
    batch = rows(6, 4)
    part = BatchSplitter().split(batch, [2, 4])[1]
    assert part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_batch_encoding_and_ordered_dict_keep_their_class() -> None:
    from transformers import BatchEncoding

    encoding = BatchEncoding({"input_ids": rows(4, 3), "attention_mask": torch.ones(4, 3)})
    parts = BatchSplitter().split(encoding, [3, 1])
    assert [type(part) for part in parts] == [BatchEncoding, BatchEncoding]
    assert parts[1].input_ids.tolist() == [[3, 3, 3]]
    assert parts[1].to("cpu")["attention_mask"].shape == (1, 3)
    assert isinstance(BatchSplitter().split(OrderedDict(x=rows(4)), [2, 2])[0], OrderedDict)


@pytest.mark.parametrize(
    ("batch", "expected", "count"),
    [
        (rows(4, 2), None, 4),
        ([rows(4, 2), rows(4)], None, 4),
        ({"x": rows(4), "class_weights": torch.ones(10)}, 4, 4),
        ([torch.zeros(3, 8, 8)] * 4, 4, 4),  # one image per sample
        (([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4), 4, 4),
        (["a", "b"], None, 2),
    ],
)
def test_count(batch: Any, expected: int | None, count: int) -> None:
    assert BatchSplitter(expected=expected).count(batch) == count


def test_lists_of_samples_stay_lists_of_samples_in_a_ragged_batch() -> None:
    splitter = BatchSplitter(expected=4)
    images = [torch.full((3, 8, 8), index) for index in range(4)]
    assert splitter.count(images) == 4
    assert splitter.count(images[:3]) == 3
    parts = splitter.split(images[:3], [2, 1])
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1][0] is images[2]


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first dimensions \[4, 10\].*split_batch"):
        BatchSplitter().count({"x": rows(4), "class_weights": torch.ones(10)})
    with pytest.raises(ValueError, match="`object` without tensors"):
        BatchSplitter().count(object())
    with pytest.raises(ValueError, match=r"contains a `object`.*split_batch"):
        BatchSplitter().split({"x": rows(4), "graph": object()}, [2, 2])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensor"):
        BatchSplitter().split({"x": nested}, [1, 1])


def test_hook_for_graphs() -> None:
    class Graphs(list):
        pass

    def split(batch: Any, sizes: list[int]) -> list[Any]:
        return [Graphs(batch[:1]), Graphs(batch[1:])] if len(sizes) > 1 else [batch]

    splitter = BatchSplitter(split, num_samples=len)
    assert splitter.count(Graphs("abc")) == 3
    assert splitter.split(Graphs("abc"), [1, 2]) == [["a"], ["b", "c"]]
    with pytest.raises(ValueError, match=r"returned 2 parts.*3 sizes"):
        splitter.split(Graphs("abc"), [1, 1, 1])


# --- weights ----------------------------------------------------------------------------------------------------------


LABELS = torch.tensor([[1, 2, -100], [-100, -100, -100], [4, 5, 6], [7, -100, -100]])


def weights_of(batch: dict[str, torch.Tensor], sizes: list[int], shifted: bool = False) -> list[float]:
    splitter = BatchSplitter(shifts_labels=shifted)
    return splitter.read(batch, sum(sizes)).weights_of(splitter.split(batch, sizes), sizes)


def test_unmasked_tokens_count() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 2]) == [2, 0, 4]
    assert BatchSplitter().read({"labels": LABELS}).weight == 6


def test_the_first_label_does_not_count_for_the_next_token() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 1, 1], shifted=True) == [1, 0, 2, 0]


def test_samples_count_without_integer_labels() -> None:
    assert weights_of({"x": LABELS}, [3, 1]) == [3, 1]
    assert weights_of({"labels": LABELS.float()}, [3, 1]) == [3, 1]
    assert weights_of({"labels": torch.tensor([1, 2, -100, 3])}, [3, 1]) == [2, 1]


def test_the_users_weight_decides_and_must_add_up() -> None:
    batch = {"labels": LABELS}
    splitter = BatchSplitter(loss_weight=lambda part: part["labels"].gt(4).sum())
    found = splitter.read(batch)
    assert found.weight == 3
    assert splitter.micro_batches(batch, found, 2)[1:] == ([2, 2], [0, 3])
    with pytest.raises(ValueError, match=r"adds up to 2\.0.*to 1\.0"):
        BatchSplitter(loss_weight=lambda part: 1.0).read(batch).weights_of([None, None], [2, 2])


def test_hugging_face_models_that_shift() -> None:
    import transformers as hf

    tiny = {"vocab_size": 11}
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=8, **tiny))
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(num_layers=1, d_model=8, d_kv=4, num_heads=1, d_ff=8, **tiny))
    bert = hf.BertForMaskedLM(
        hf.BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8, **tiny)
    )
    assert predicts_next_token(nn.ModuleList([gpt2]))
    assert not predicts_next_token(t5)
    assert not predicts_next_token(bert)
    assert not predicts_next_token(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_weights_are_what_the_loss_is_a_mean_over(kind: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    small = {"vocab_size": 11}
    if kind == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=8, **small)).eval()
    else:
        config = hf.BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8, **small)
        model = hf.BertForMaskedLM(config).eval()
    batch = {"input_ids": torch.randint(1, 11, (4, 3)), "labels": LABELS}
    parts = BatchSplitter().split(batch, [1, 1, 2])
    weights = weights_of(batch, [1, 1, 2], predicts_next_token(model))
    losses = [model(**part).loss for part in parts]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)
    assert float(mean) == pytest.approx(float(model(**batch).loss), abs=1e-6)
