"""`PreferenceLM`: direct preference optimization (DPO) of a Hugging Face causal language model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.adapters.layer import adapters_off
from lightning_memfit.adapters.lora import adapter_parameters
from lightning_memfit.memory.conversion import default_dtype
from lightning_memfit.models.architecture import without_dropout
from lightning_memfit.models.causal_lm import CausalLM
from lightning_memfit.models.metrics import WeightedMean
from lightning_memfit.models.network_module import check_range

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_REFERENCE = "reference."


class PreferenceLM(CausalLM):
    """Teach a causal language model to prefer one answer to another, as far as it stays close to what it was.

    The loss of a pair is `-log sigmoid(beta * ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))))`
    with the model's probabilities p and those of the frozen reference q, the model as it was (Rafailov et al. 2023,
    "Direct Preference Optimization", equation 7; with `label_smoothing` Mitchell 2023, "A note on DPO with noisy
    preferences", equation 3).

    Dropout of the model is off, as it would be noise in the likelihoods that are compared; what an exported model's
    configuration says is this, too. To have some, set it in `config`.

    Batches are dictionaries with `input_ids`, `attention_mask` and `labels`, all `(batch, 2, length)` integers, the
    chosen answer first; labels of -100 don't count. The module logs `train_loss`, `val_loss` (in nats per pair),
    `val_accuracy`, the share of pairs in which the chosen answer has gained more than the rejected one, and
    `val_margin`, the mean of `beta` times the difference of these gains (and `test_*`).

    Args:
        beta: How dear it is to move away from the reference.
        label_smoothing: Share of the pairs that are taken to be labelled the wrong way round.
        reference: `copy` holds the frozen model a second time; `adapters_off` runs the model without its adapters, for
            runs with `Lora`, and takes no memory.
        reference_dtype: Type of the copy's weights, for mixed precision, which computes in that type anyway. Null: that
            of the model's weights.
        pretrained: Hub name or local folder (safetensors) of the model to fine-tune. Null: random weights.
        config_name: Hub name or local folder whose architecture is built when `pretrained` is null.
        config: Inline architecture with its `model_type`, or entries that change the named one.
        attn_implementation: Attention kernel: `sdpa`, `eager` or `flash_attention_2`.
        learning_rate: Peak learning rate.
        min_learning_rate_fraction: Learning rate at the end of the cosine, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of weight matrices; biases and norms have none.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer, for example `betas: [0.9, 0.95]`.

    Raises:
        ValueError: If an argument is out of range; when a run begins, if `reference` doesn't go with its adapters.
    """

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        reference: Literal["copy", "adapters_off"] = "copy",
        reference_dtype: Literal["bfloat16", "float16"] | None = None,
        pretrained: str | None = None,
        config_name: str | None = None,
        config: dict[str, Any] | None = None,
        attn_implementation: str = "sdpa",
        learning_rate: float = 5e-7,
        min_learning_rate_fraction: float = 0.0,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            pretrained,
            config_name,
            config,
            attn_implementation,
            learning_rate,
            min_learning_rate_fraction,
            warmup_steps,
            weight_decay,
            optimizer,
            optimizer_options,
        )
        check_range("beta", beta, 0.0)
        check_range("label_smoothing", label_smoothing, 0.0, 0.5)
        if reference not in ("copy", "adapters_off"):
            raise ValueError(f"`reference={reference!r}` is unknown. Choose from: copy, adapters_off.")
        if reference_dtype not in (None, "bfloat16", "float16"):
            raise ValueError(f"`reference_dtype={reference_dtype!r}` is unknown. Choose from: bfloat16, float16.")
        if reference_dtype is not None and reference != "copy":
            raise ValueError(f"`reference_dtype={reference_dtype!r}` is for `reference: copy`. Leave it out.")
        self.save_hyperparameters()
        del self.val_perplexity, self.test_perplexity
        self.val_accuracy, self.test_accuracy = WeightedMean(), WeightedMean()
        self.val_margin, self.test_margin = WeightedMean(), WeightedMean()
        self.reference: Any = None

    @override
    def read_architecture(self) -> PretrainedConfig:
        """Return the Hugging Face configuration, without dropout unless `config` has some."""
        return without_dropout(super().read_architecture(), self.hparams["config"])

    @override
    def configure_model(self) -> None:
        """Build the model, and with `reference: copy` freeze a copy of it. A second call does nothing."""
        is_new = self.model is None
        super().configure_model()
        if is_new and self.hparams["reference"] == "copy":
            self.reference = self._make_reference().requires_grad_(False).eval()

    def _make_reference(self) -> Any:
        """Return the model once more, in its own type of weights; one that is pretrained is read again."""
        wanted = self.hparams["reference_dtype"]
        with default_dtype(None if wanted is None else getattr(torch, wanted)):
            made = self.make_network()
        if self.hparams["pretrained"] is None:
            made.load_state_dict(self.network.state_dict())
        return made

    @override
    def on_fit_start(self) -> None:
        """Refuse a reference that isn't the model as it was."""
        self._check_reference()

    @override
    def on_validation_start(self) -> None:
        """Refuse a reference that isn't the model as it was."""
        self._check_reference()

    @override
    def on_test_start(self) -> None:
        """Refuse a reference that isn't the model as it was."""
        self._check_reference()

    @override
    def on_predict_start(self) -> None:
        """Refuse a reference that isn't the model as it was."""
        self._check_reference()

    def _check_reference(self) -> None:
        """Refuse a reference that isn't the model as it was.

        Raises:
            ValueError: If adapters are switched off that are missing or aren't all that is trained, or a copy has some.
        """
        kind, adapters = self.hparams["reference"], {id(parameter) for parameter in adapter_parameters(self)}
        if kind == "copy":
            if adapters:
                raise ValueError(
                    "`reference: copy` beside Lora holds the frozen weights twice, and the copy would get adapters, "
                    "too. Set `reference: adapters_off`."
                )
            return
        if not adapters:
            raise ValueError(
                "`reference: adapters_off` needs adapters, and there are none, so that the reference would be the "
                "trained model. Train with the callback Lora, or set `reference: copy`; outside of a training run, "
                "adapters are merged, and only `copy` has a reference."
            )
        others = [name for name, p in self.named_parameters() if p.requires_grad and id(p) not in adapters]
        if others:
            raise ValueError(
                f"`reference: adapters_off`, but {others[0]} is trained beside the adapters: without these the model "
                "isn't what it was. Leave `train` of Lora out, or set `reference: copy` and train without Lora."
            )

    # --- the loss ---------------------------------------------------------------------------------------------------

    def _log_probabilities(self, network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability in nats of the labels of each sequence, `(batch, 2)`."""
        ids, labels = batch["input_ids"], batch["labels"]
        logits = network(
            input_ids=ids.flatten(0, 1), attention_mask=batch["attention_mask"].flatten(0, 1), use_cache=False
        ).logits
        targets = labels.flatten(0, 1)[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
        return -losses.view(*labels.shape[:2], -1).sum(dim=-1)

    def _gains(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return how much likelier than in the reference the model finds each answer, in nats, `(batch, 2)`."""
        self._check_length(batch["input_ids"].shape[-1])
        network = self.network
        frozen = network if self.reference is None else self.reference
        was_training = frozen.training
        frozen.eval()
        # Nothing in it learns, so that there is no graph. Without gradients ChunkedLoss would leave the logits whole.
        with adapters_off() if self.reference is None else nullcontext():
            before = self._log_probabilities(frozen, batch).detach()
        frozen.train(was_training)
        return self._log_probabilities(network, batch) - before

    def _losses(self, gains: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair in nats, `(batch,)`."""
        smoothing = self.hparams["label_smoothing"]
        scores: torch.Tensor = self.hparams["beta"] * (gains[:, 0] - gains[:, 1])
        losses: torch.Tensor = (smoothing - 1) * F.logsigmoid(scores) - smoothing * F.logsigmoid(-scores)
        return losses

    @override
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(self._gains(batch)).mean()

    @override
    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        gains = self._gains(batch)
        margins = gains[:, 0] - gains[:, 1]
        found = {"loss": self._losses(gains), "accuracy": (margins > 0).float()}
        for name, values in {**found, "margin": self.hparams["beta"] * margins}.items():
            metric = getattr(self, f"{stage}_{name}")
            metric.update(values)
            self.log(f"{stage}_{name}", metric, prog_bar=name == "loss", batch_size=len(values))

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return how much likelier than in the reference each answer is, in nats, `(batch, 2)`."""
        return self._gains(batch)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    @override
    def remade_weights(self) -> tuple[str, ...]:
        """The reference, if it is a pretrained model, which is read again."""
        return () if self.hparams["pretrained"] is None else (_REFERENCE,)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what is made again."""
        super().on_save_checkpoint(checkpoint)
        entries, remade = checkpoint["state_dict"], self.remade_weights
        checkpoint["state_dict"] = {name: value for name, value in entries.items() if not name.startswith(remade)}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete the checkpoint with the reference that was read; strategies that divide weights have loaded them."""
        super().on_load_checkpoint(checkpoint)
        if "state_dict" in checkpoint:
            own = {name: value for name, value in self.state_dict().items() if name.startswith(_REFERENCE)}
            checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}
