"""Build a named model on the meta device and trace its training step.

This module imports torch; `named` imports it only if the profile is not in the cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_memfit.estimate.architectures import Architecture, NamedRun
from lightning_memfit.optim.optimizers import find_optimizer
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import OptimizerFactory, StepOptions
from lightning_memfit.profile.trace import Emulation

_LEARNING_RATE = 1e-4  # no memory depends on it


def trace_named(
    run: NamedRun,
    architecture: Architecture,
    shorten: bool = True,
    callbacks: tuple[Any, ...] = (),
    ranks: Ranks | None = None,
) -> ModelProfile:
    """Trace a named run; see `profile_module` for `callbacks` and `ranks`.

    Raises:
        TraceError: If the step can't be traced.
    """
    model = build_model(architecture, run.attention)
    length = run.sequence_length or architecture.sequence_length
    if run.checkpointing == "full":
        _checkpoint(model)
    batch = make_batch(architecture, model.config, run.micro_batch_size, length)
    make_optimizer: OptimizerFactory | None = optimizer_factory(run.optimizer)
    if callbacks or ranks is not None:  # they need a Trainer, which costs half a second
        model, make_optimizer = _as_lightning_module(model, run.optimizer), None
    profile = profile_module(
        model,
        batch,
        StepOptions(run.precision, run.accumulate_grad_batches),  # type: ignore[arg-type]
        Emulation(run.device, run.capability),
        callbacks,
        make_optimizer,
        shorten=shorten,
        ranks=ranks,
    )
    return replace(profile, name=architecture.name)


def _as_lightning_module(model: Any, optimizer: str) -> Any:
    """Wrap the model in the LightningModule that a Trainer and technique callbacks need."""
    import lightning.pytorch as pl

    class NamedModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @override
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_factory(optimizer)(self)

        @override
        def __reduce__(self) -> Any:
            return _as_lightning_module, (self.model, optimizer)

    return NamedModule()


def build_model(architecture: Architecture, attention: str | None) -> Any:
    """The model in training mode, without memory.

    Raises:
        ValueError: If transformers doesn't know the model, or has no such attention for it.
    """
    import transformers

    if not hasattr(transformers, architecture.model_class):
        raise ValueError(f"transformers {transformers.__version__} has no class `{architecture.model_class}`.")
    config = _config(architecture)
    config.use_cache = False
    if attention is not None:
        config._attn_implementation = attention
    model_class = getattr(transformers, architecture.model_class)
    with torch.device("meta"):
        model = model_class._from_config(config).train()
    if architecture.kind == "causal":
        model.loss_type = "ForCausalLM"  # transformers would warn about the name of GPT-2's class
    return model


def _config(architecture: Architecture) -> Any:
    from transformers import AutoConfig

    # The run's own precision counts, not that of published weights.
    entries = {key: value for key, value in architecture.config.items() if key not in ("dtype", "torch_dtype")}
    try:
        return AutoConfig.for_model(**{**entries, "model_type": architecture.model_type})
    except ValueError as error:
        raise ValueError(f"`--model {architecture.name}`: transformers knows no such model: {error}") from error


def make_batch(architecture: Architecture, config: Any, size: int, length: int | None) -> dict[str, torch.Tensor]:
    """A batch of the shapes and dtypes that training has, without padding."""
    classes = torch.zeros(size, dtype=torch.long)
    if architecture.kind == "image classification":
        side = config.image_size
        return {"pixel_values": torch.zeros(size, config.num_channels, side, side), "labels": classes}
    assert length is not None
    if architecture.kind == "speech recognition":
        features = torch.zeros(size, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": torch.full((size, length), 3)}
    tokens = 3 + torch.arange(size * length).view(size, length) % (min(config.get_text_config().vocab_size, 1000) - 3)
    return {"input_ids": tokens, "labels": classes if architecture.kind == "text classification" else tokens.clone()}


def _checkpoint(model: torch.nn.Module) -> None:
    from lightning_memfit.checkpointing.apply import apply_checkpointing
    from lightning_memfit.checkpointing.blocks import find_blocks

    blocks = [block for group in find_blocks(model) for block in group.modules]
    if not blocks:
        raise ValueError(f"`checkpointing='full'`: {type(model).__name__} has no repeated blocks.")
    apply_checkpointing(blocks, ["full"] * len(blocks))


def optimizer_factory(name: str) -> OptimizerFactory:
    """A function that builds the optimizer of a record, of which there must be one, over a module's parameters."""
    find_optimizer(name)
    return partial(_made, name)


def _made(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = find_optimizer(name).make(module.parameters(), _LEARNING_RATE)
    return made
