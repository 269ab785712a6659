"""Language models: padding, masks, shifted labels."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.base import BATCH, NUM_SAMPLES, Case, Lit, ints, uniform

VOCABULARY = 17
LENGTH = 7
MASKED = -100


def sentences() -> list[dict[str, Tensor]]:
    """Sentences padded on the right, with some labels masked; one of them has no label at all."""
    ids = ints(1, VOCABULARY, NUM_SAMPLES, LENGTH, seed=1)
    sizes = ints(2, LENGTH + 1, NUM_SAMPLES, seed=2)
    padding = torch.arange(LENGTH)[None] >= sizes[:, None]
    ids[padding] = 0
    labels = ids.masked_fill(padding | (uniform(NUM_SAMPLES, LENGTH, seed=3) < 0.25), MASKED)
    labels[5] = MASKED
    mask = (~padding).long()
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]


class Tokens(nn.Module):
    """Predicts a token at each place from it and the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def token_loss(logits: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **arguments)


class TokenStep(Lit):
    """`Tokens` with a loss and a collate function of the case's own."""

    def __init__(self, loss: Callable[..., Tensor], data: list[Any] | None = None) -> None:
        super().__init__()
        self.net = Tokens()
        self.loss = loss
        self.data = sentences() if data is None else data

    def loss_of(self, batch: Any) -> Tensor:
        return self.loss(self.net, batch)


def _shifted(net: Any, batch: Any) -> Tensor:
    return token_loss(net(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])


def _float_mask(net: Any, batch: Any) -> Tensor:
    losses = token_loss(net(batch["tokens"]), batch["targets"], reduction="none")
    mask = batch["mask"].flatten()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _labels_per_sentence(net: Any, batch: Any) -> Tensor:
    labels = batch["labels"]
    known = labels.ne(MASKED)
    losses = token_loss(net(batch["input_ids"]), labels, reduction="none").view_as(labels)
    return (losses.sum(1) / known.sum(1).clamp(min=1)).mean()


def _trimmed(net: Any, batch: Any) -> Tensor:
    """Padding is cut off in the step, down to the longest sentence, and the mean goes over what is left."""
    longest = int(batch["mask"].sum(1).max())
    return token_loss(net(batch["tokens"][:, :longest]), batch["targets"][:, :longest])


def _with_item_count(net: Any, batch: Any) -> Tensor:
    return token_loss(net(batch["input_ids"]), batch["labels"], reduction="sum") / batch["num_items_in_batch"]


def _packed(net: Any, batch: Any) -> Tensor:
    """All sentences in one row; a sentence's state starts at its offset."""
    ends = batch["cu_seqlens"].tolist()
    losses = [token_loss(net(batch["ids"][None, a:b])[:, :-1], batch["ids"][None, a + 1 : b])
              for a, b in pairwise(ends)]  # fmt: skip
    return torch.stack(losses).mean()


def _masked_data() -> list[dict[str, Tensor]]:
    return [
        {"tokens": s["input_ids"], "targets": s["labels"].clamp(min=0), "mask": s["attention_mask"].double()}
        for s in sentences()
    ]


class PackedRow(TokenStep):
    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> Any:
        rows = [s["input_ids"][: int(s["attention_mask"].sum())] for s in samples]
        ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        return {"ids": torch.cat(rows), "cu_seqlens": ends}

    def samples_in(self, batch: Any) -> int:
        return len(batch["cu_seqlens"]) - 1


class ItemCount(TokenStep):
    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> Any:
        batch = {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
        return {**batch, "num_items_in_batch": batch["labels"].ne(MASKED).sum()}


class PadToLongest(TokenStep):
    """Batches as long as their longest sentence."""

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> Any:
        longest = max(int(s["attention_mask"].sum()) for s in samples)
        return {key: torch.stack([s[key][:longest] for s in samples]) for key in samples[0]}


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return token_loss(logits[:, :-1], labels[:, 1:])


class HuggingFace(Lit):
    """A model of transformers on its own inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers as hf

        small = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            self.net: Any = hf.GPT2LMHeadModel(
                hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, **small, **off)
            )
        else:
            self.net = hf.MixtralForCausalLM(hf.MixtralConfig(
                num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
                router_aux_loss_coef=0.1, **small
            ))  # fmt: skip
            self.net.config._experts_implementation = "eager"  # its default has no float64
        self.net.loss_function = next_token_loss  # theirs computes in float32
        self.data = sentences()

    def loss_of(self, batch: Any) -> Tensor:
        return self.net(**batch).loss


def _encoding(samples: list[dict[str, Tensor]]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({key: torch.stack([s[key] for s in samples]) for key in samples[0]})


class WithBatchEncoding(HuggingFace):
    collate = staticmethod(_encoding)


def _tuples() -> list[Any]:
    return [(s["input_ids"], s["labels"]) for s in sentences()]


def _masked_later() -> list[Any]:
    """The first batch has no masked label, so that a look at it doesn't show that the mean is over labels."""
    ids = ints(1, VOCABULARY, NUM_SAMPLES, LENGTH, seed=1)
    masked = uniform(NUM_SAMPLES, LENGTH, seed=3) < uniform(NUM_SAMPLES, 1, seed=4)
    masked[:BATCH] = False
    return list(zip(ids, ids.masked_fill(masked, MASKED), strict=True))


def _pairs() -> list[Any]:
    chosen, rejected = (ints(1, VOCABULARY, NUM_SAMPLES, LENGTH, seed=seed) for seed in (7, 8))
    return [{"chosen": a, "rejected": b} for a, b in zip(chosen, rejected, strict=True)]


def _labelled(net: Any, batch: Any, **arguments: Any) -> Tensor:
    return token_loss(net(batch["input_ids"]), batch["labels"], **arguments)


CASES = (
    Case("hf_causal_lm", "GPT-2 with padding and -100 in `labels`", lambda: HuggingFace("gpt2")),
    Case("hf_batch_encoding", "GPT-2 on a `BatchEncoding`", lambda: WithBatchEncoding("gpt2")),
    Case("hf_mixture_of_experts", "Mixtral with its load-balancing loss", lambda: HuggingFace("mixtral"), "either"),
    Case("token_labels", "token loss, `labels` with -100", lambda: TokenStep(_labelled)),
    Case("pad_to_longest", "batches as long as their longest sentence", lambda: PadToLongest(_labelled)),
    Case("labels_masked_later", "-100 in the labels of a tuple, none of them in the first batch", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch[0]), batch[1]), _masked_later()
    ), "either"),
    Case("float_mask", "mean over a float mask", lambda: TokenStep(_float_mask, _masked_data()), "either"),
    Case("labels_mean_per_sentence", "mean over sentences of means over tokens, `labels` with -100", lambda: TokenStep(
        _labels_per_sentence
    ), "either"),
    Case("trimmed_in_step", "padding cut off in the step, mean over the rest", lambda: TokenStep(
        _trimmed, _masked_data()
    ), "refused"),
    Case("padding_is_ignored", "`ignore_index` is the padding token", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch[0])[:, :-1], batch[0][:, 1:], ignore_index=0), _tuples()
    ), "either"),
    Case("own_shifted_labels", "`labels` with -100, shifted in the step", lambda: TokenStep(_shifted), "either"),
    Case("num_items_in_batch", "sum over tokens / a count that the batch brings", lambda: ItemCount(
        _with_item_count
    ), "either"),
    Case("packed_row", "sentences in one row with `cu_seqlens`", lambda: PackedRow(_packed), "either"),
)  # fmt: skip
