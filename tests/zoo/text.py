"""Language models: padding, masks, shifted labels, tensors with time first."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.base import BATCH, NUM_SAMPLES, Case, Lit, floats, ints, uniform

VOCABULARY = 17
LENGTH = 7
MASKED = -100


def sentences(num: int = NUM_SAMPLES, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Sentences padded on the right, with some labels masked; one of them has no label at all."""
    ids = ints(1, VOCABULARY, num, length, seed=1)
    sizes = ints(2, length + 1, num, seed=2)
    padding = torch.arange(length)[None] >= sizes[:, None]
    ids[padding] = 0
    labels = ids.masked_fill(padding | (uniform(num, length, seed=3) < 0.25), MASKED)
    labels[5] = MASKED
    mask = (~padding).long()
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]


class Tokens(nn.Module):
    """Predicts a token at each place from it and the ones before."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.GRU(8, 8, batch_first=batch_first)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def token_loss(logits: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **arguments)


class TokenStep(Lit):
    """`Tokens` with a loss and a collate function of the case's own."""

    def __init__(self, loss: Callable[..., Tensor], data: list[Any] | None = None, batch_first: bool = True) -> None:
        super().__init__()
        self.net = Tokens(batch_first)
        self.loss = loss
        self.data = sentences() if data is None else data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _shifted(net: Any, batch: Any) -> Tensor:
    return token_loss(net(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])


def _ids_shifted(net: Any, batch: Any) -> Tensor:
    return token_loss(net(batch)[:, :-1], batch[:, 1:])


def _float_mask(net: Any, batch: Any) -> Tensor:
    losses = token_loss(net(batch["tokens"]), batch["targets"], reduction="none")
    mask = batch["mask"].flatten()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _per_sentence(net: Any, batch: Any) -> Tensor:
    """Mean over sentences of the mean over their own tokens."""
    mask = batch["mask"]
    losses = token_loss(net(batch["tokens"]), batch["targets"], reduction="none").view_as(mask)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def _labels_per_sentence(net: Any, batch: Any) -> Tensor:
    labels = batch["labels"]
    known = labels.ne(MASKED)
    losses = token_loss(net(batch["input_ids"]), labels, reduction="none").view_as(labels)
    return (losses.sum(1) / known.sum(1).clamp(min=1)).mean()


def _trimmed(net: Any, batch: Any) -> Tensor:
    """Padding is cut off in the step, down to the longest sentence, and the mean goes over what is left."""
    longest = int(batch["mask"].sum(1).max())
    return token_loss(net(batch["tokens"][:, :longest]), batch["targets"][:, :longest])


def _masked_in_place(net: Any, batch: Any) -> Tensor:
    """`labels` are the ids themselves: masking them changes the ids, too."""
    batch["labels"][batch["labels"] == 3] = 0
    return _labelled(net, batch)


def _with_item_count(net: Any, batch: Any) -> Tensor:
    return token_loss(net(batch["input_ids"]), batch["labels"], reduction="sum") / batch["num_items_in_batch"]


def _preference(net: Any, batch: Any) -> Tensor:
    def score(ids: Tensor) -> Tensor:
        return net(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    return -F.logsigmoid(0.5 * (score(batch["chosen"]) - score(batch["rejected"]))).mean()


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


def _time_first(samples: list[dict[str, Tensor]]) -> Any:
    return torch.stack([s["input_ids"] for s in samples], 1), torch.stack([s["labels"] for s in samples], 1)


class TimeFirst(TokenStep):
    """Tensors of shape (time, batch)."""

    collate = staticmethod(_time_first)

    def __init__(self, length: int = LENGTH, num: int = NUM_SAMPLES) -> None:
        data = [{**s, "labels": s["input_ids"]} for s in sentences(num, length)]
        super().__init__(lambda net, batch: token_loss(net(batch[0]), batch[1]), data, batch_first=False)

    def samples_in(self, batch: Any) -> int:
        return batch[0].shape[1]


class TimeFirstWithHook(TimeFirst):
    def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
        return list(zip(*(one.split(sizes, 1) for one in batch), strict=True))

    def num_samples(self, batch: Any) -> int:
        return batch[0].shape[1]


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


class SameIds(TokenStep):
    """Labels are the very tensor of the inputs."""

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> Any:
        ids = torch.stack([s["input_ids"] for s in samples])
        return {"input_ids": ids, "labels": ids}


class HuggingFace(Lit):
    """A model of transformers on its own inputs."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        import transformers as hf

        small = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
            self.net: Any = hf.GPT2LMHeadModel(
                hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, **small, **off)
            )
        elif kind == "bert":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.net = hf.BertForMaskedLM(hf.BertConfig(
                num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, **small, **off
            ))  # fmt: skip
        elif kind == "classifier":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.net = hf.BertForSequenceClassification(hf.BertConfig(
                num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_labels=3,
                **small, **off
            ))  # fmt: skip
        elif kind == "t5":
            self.net = hf.T5ForConditionalGeneration(hf.T5Config(
                num_layers=1, d_model=16, d_kv=8, num_heads=2, d_ff=16, dropout_rate=0.0, decoder_start_token_id=0,
                **small
            ))  # fmt: skip
        elif kind == "mixtral":
            self.net = hf.MixtralForCausalLM(hf.MixtralConfig(
                num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
                router_aux_loss_coef=0.1, **small
            ))  # fmt: skip
            self.net.config._experts_implementation = "eager"  # its default has no float64
        if kind in ("gpt2", "mixtral"):
            self.net.loss_function = next_token_loss  # theirs computes in float32
        self.data = sentences()
        if kind == "classifier":
            self.data = [{**s, "labels": s["input_ids"][0] % 3} for s in self.data]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _encoding(samples: list[dict[str, Tensor]]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({key: torch.stack([s[key] for s in samples]) for key in samples[0]})


class WithBatchEncoding(HuggingFace):
    collate = staticmethod(_encoding)


class SoftPrompt(Lit):
    """Learned prompts before each sentence, and a mask made inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(floats(2, 8, seed=4))
        self.net = Tokens()
        self.data = sentences()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        hidden = torch.cat([self.prompt.expand(len(ids), -1, -1), self.net.embed(ids)], 1)
        logits = self.net.head(self.net.rnn(hidden)[0])[:, 2:]
        loss = token_loss(logits, batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


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
    Case("hf_causal_lm_dropout", "the same with dropout", lambda: HuggingFace("gpt2", dropout=0.1), "accepted"),
    Case("hf_masked_lm", "BERT, most labels -100", lambda: HuggingFace("bert")),
    Case("hf_seq2seq", "T5 with padded targets", lambda: HuggingFace("t5")),
    Case("hf_classifier", "BERT with a class per text", lambda: HuggingFace("classifier")),
    Case("hf_batch_encoding", "GPT-2 on a `BatchEncoding`", lambda: WithBatchEncoding("gpt2")),
    Case("hf_mixture_of_experts", "Mixtral with its load-balancing loss", lambda: HuggingFace("mixtral"), "either"),
    Case("token_labels", "token loss, `labels` with -100", lambda: TokenStep(_labelled)),
    Case("token_labels_smoothed", "the same with label smoothing", lambda: TokenStep(
        lambda net, batch: _labelled(net, batch, label_smoothing=0.1)
    )),
    Case("pad_to_longest", "batches as long as their longest sentence", lambda: PadToLongest(_labelled)),
    Case("labels_in_tuple", "-100 in the labels of a tuple", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch[0]), batch[1]), _tuples()
    ), "either"),
    Case("labels_masked_later", "the same, none of them in the first batch", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch[0]), batch[1]), _masked_later()
    ), "either"),
    Case("labels_under_other_key", "-100 under the key `targets`", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch["tokens"]), batch["targets"]),
        [{"tokens": i, "targets": y} for i, y in _tuples()],
    ), "either"),
    Case("float_mask", "mean over a float mask", lambda: TokenStep(_float_mask, _masked_data()), "either"),
    Case("mean_per_sentence", "mean over sentences of means over tokens", lambda: TokenStep(
        _per_sentence, _masked_data()
    )),
    Case("labels_mean_per_sentence", "the same with `labels` and -100", lambda: TokenStep(
        _labels_per_sentence
    ), "either"),
    Case("trimmed_in_step", "padding cut off in the step, mean over the rest", lambda: TokenStep(
        _trimmed, _masked_data()
    ), "refused"),
    Case("labels_are_inputs", "`labels` is the tensor of ids, masked in place", lambda: SameIds(_masked_in_place)),
    Case("padding_is_ignored", "`ignore_index` is the padding token", lambda: TokenStep(
        lambda net, batch: token_loss(net(batch[0])[:, :-1], batch[0][:, 1:], ignore_index=0), _tuples()
    ), "either"),
    Case("own_shifted_labels", "`labels` with -100, shifted in the step", lambda: TokenStep(_shifted), "either"),
    Case("ids_shifted", "a bare tensor of ids predicts its next token", lambda: TokenStep(
        _ids_shifted, [s["input_ids"] for s in sentences()]
    )),
    Case("num_items_in_batch", "sum over tokens / a count that the batch brings", lambda: ItemCount(
        _with_item_count
    ), "either"),
    Case("preference_pairs", "DPO-like pairs", lambda: TokenStep(_preference, _pairs())),
    Case("packed_row", "sentences in one row with `cu_seqlens`", lambda: PackedRow(_packed), "either"),
    Case("soft_prompt", "learned prompts before each sentence", SoftPrompt),
    Case("time_first", "tensors of shape (time, batch)", TimeFirst, "either"),
    Case("time_first_with_hook", "(time, batch) with the module's `split_batch`", TimeFirstWithHook),
)  # fmt: skip
