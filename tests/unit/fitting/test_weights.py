import pytest
import torch
from torch import nn

from lightning_memfit.fitting.step.split import BatchSplitter, batch_statistics, predicts_next_token, weigh

LABELS = torch.tensor([[1, 2, -100], [-100, -100, -100], [4, 5, 6], [7, -100, -100]])


def weights_of(batch: dict[str, torch.Tensor], sizes: list[int], shifted: bool = False) -> list[float]:
    found = weigh(batch, sum(sizes), shifted)
    return found.of_parts(BatchSplitter().split(batch, sizes), sizes)


def test_unmasked_tokens_count() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 2]) == [2, 0, 4]
    assert weigh({"labels": LABELS}, 4, shifted=False).total == 6


def test_the_first_label_does_not_count_for_the_next_token() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 1, 1], shifted=True) == [1, 0, 2, 0]


def test_samples_count_without_integer_labels() -> None:
    assert weights_of({"x": LABELS}, [3, 1]) == [3, 1]
    assert weights_of({"labels": LABELS.float()}, [3, 1]) == [3, 1]
    assert weights_of({"labels": torch.tensor([1, 2, -100, 3])}, [3, 1]) == [2, 1]


def test_the_users_weight_decides_and_must_add_up() -> None:
    batch = {"labels": LABELS}
    found = weigh(batch, 4, False, lambda part: part["labels"].gt(4).sum())
    assert found.total == 3
    assert found.of_parts(BatchSplitter().split(batch, [2, 2]), [2, 2]) == [0, 3]
    with pytest.raises(ValueError, match=r"adds up to 2\.0.*to 1\.0"):
        weigh(batch, 4, False, lambda part: 1.0).of_parts([None, None], [2, 2])


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
    weights = weigh(batch, 4, predicts_next_token(model)).of_parts(parts, [1, 1, 2])
    losses = [model(**part).loss for part in parts]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)
    assert float(mean) == pytest.approx(float(model(**batch).loss), abs=1e-6)


def test_frozen_batch_norm_is_no_matter() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert batch_statistics(net) == ["0"]
    net[0].eval()
    assert batch_statistics(net) == []
