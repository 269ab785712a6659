"""Direct preference optimization (DPO) of a language model, on trl's rows and templates and on peft's adapters.

    memfit fit --config examples/preference.yaml --data.dataset=preferences.jsonl
    memfit fit --config examples/preference.yaml --config examples/preference_quick.yaml  # two steps on one CPU

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs trl, peft and datasets.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

from lightning_memfit.data.tokenization import BYTES, byte_tokenizer

_TO_TRY = [
    {"prompt": f"How many legs has a {animal}? ", "chosen": legs, "rejected": "Five."}
    for animal, legs in (("beetle", "Six."), ("crab", "Ten."), ("spider", "Eight."), ("snail", "None."))
]


class Preferring(pl.LightningModule):
    """Make chosen answers likelier than rejected ones, both measured by the frozen model as it was.

    The loss of a pair, in nats, is `-log sigmoid(beta * (gain(chosen) - gain(rejected)))`, where the gain of an answer
    is its log-likelihood minus that in the reference (Rafailov et al. 2023, "Direct Preference Optimization", eq. 7).
    Logs `train_loss`, and `train_accuracy`, the share of pairs whose chosen answer gained more.

    Args:
        pretrained: Hub name or local folder of the model. Null: random weights of the architecture `config`.
        config: Arguments of the architecture, with its `model_type`.
        lora_rank: Rank of peft's adapters, without which the model is the reference. Null: all weights are trained, and
            the reference is a frozen copy, which takes the memory of the weights again.
        beta: How dear it is to move away from the reference.
        learning_rate: Constant learning rate of AdamW.
    """

    def __init__(
        self,
        pretrained: str | None = "Qwen/Qwen3-4B",
        config: dict[str, Any] | None = None,
        lora_rank: int | None = 16,
        beta: float = 0.1,
        learning_rate: float = 5e-6,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None
        self.reference: Any = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if self.hparams["pretrained"] is None:
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.hparams["config"]))
        else:
            network = AutoModelForCausalLM.from_pretrained(
                self.hparams["pretrained"], dtype=torch.get_default_dtype()
            ).train()
        if self.hparams["lora_rank"] is None:
            self.reference = deepcopy(network).requires_grad_(False).eval()
            self.network = network
        else:
            rank = self.hparams["lora_rank"]
            options = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self.network = get_peft_model(network, options, autocast_adapter_dtype=False)

    def log_likelihoods(self, network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return those of the answers in nats, `(batch, 2)`, the chosen one first."""
        ids, targets = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)[:, 1:]
        logits = network(input_ids=ids, attention_mask=batch["attention_mask"].flatten(0, 1), use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
        return -losses.view(len(batch["labels"]), 2, -1).sum(dim=-1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        without = self.network.disable_adapter() if self.reference is None else nullcontext()
        with torch.no_grad(), without:
            before = self.log_likelihoods(self.network if self.reference is None else self.reference, batch)
        gains = self.log_likelihoods(self.network, batch) - before
        margins = gains[:, 0] - gains[:, 1]
        loss = -F.logsigmoid(self.hparams["beta"] * margins).mean()
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(gains))
        self.log("train_accuracy", (margins > 0).float().mean(), batch_size=len(gains))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, self.hparams["learning_rate"], weight_decay=0.0)


class Preferences(pl.LightningDataModule):
    """Rows with `chosen` and `rejected`, and perhaps `prompt`: texts, or lists of messages.

    Args:
        dataset: A jsonl file, or a hub name. Null: four questions, to try a run.
        tokenizer: Hub name or local folder, with the chat template for messages; `bytes` needs no files.
        sequence_length: Tokens of a conversation, of which a sample has two; longer ones lose their beginning.
        batch_size: Comparisons of an optimizer step; `MicroBatching` cuts it to fit.
        num_workers: Loader processes.
    """

    def __init__(
        self,
        dataset: str | None,
        tokenizer: str = "Qwen/Qwen3-4B",
        sequence_length: int = 1024,
        batch_size: int = 16,
        num_workers: int = 2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        name, dataset = self.hparams["tokenizer"], self.hparams["dataset"]
        self.tokenizer: Any = byte_tokenizer() if name == BYTES else AutoTokenizer.from_pretrained(name)
        if dataset is None:
            rows = Dataset.from_list(_TO_TRY * 4)
        elif dataset.endswith(".jsonl"):
            rows = load_dataset("json", data_files=dataset, split="train")
        else:
            rows = load_dataset(dataset, split="train")
        rows = rows.map(maybe_extract_prompt)
        self.rows = rows.map(maybe_apply_chat_template, fn_kwargs={"processing_class": self.tokenizer})

    def encode(self, prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, mask and labels of a conversation, each `(sequence_length,)`; -100 where nothing is learned."""
        length, end = self.hparams["sequence_length"], self.tokenizer.eos_token
        answer = answer if answer.rstrip().endswith(end) else answer + end
        before = self.tokenizer(prompt, add_special_tokens=False).input_ids
        after = self.tokenizer(answer, add_special_tokens=False).input_ids
        ids = torch.full((length,), self.tokenizer.pad_token_id)
        kept = torch.tensor([*before, *after][-length:])
        ids[: len(kept)] = kept
        places = torch.arange(length)
        is_answer = (places < len(kept)) & (places >= len(kept) - len(after))
        return ids, (places < len(kept)).long(), torch.where(is_answer, ids, -100)

    def collate(self, rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        pairs = [[self.encode(row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]
        names = ("input_ids", "attention_mask", "labels")
        return {
            name: torch.stack([torch.stack([answer[place] for answer in pair]) for pair in pairs])
            for place, name in enumerate(names)
        }

    def train_dataloader(self) -> DataLoader[Any]:
        size, workers = self.hparams["batch_size"], self.hparams["num_workers"]
        return DataLoader(self.rows, size, shuffle=True, collate_fn=self.collate, num_workers=workers)  # type: ignore[arg-type]

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """A batch of the right shapes, for estimates without data: any data module may have this method."""
        ids = torch.ones(self.hparams["batch_size"], 2, self.hparams["sequence_length"], dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
