"""Facts that the layers of a module show, for plans: its blocks, and Hugging Face models in it."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn import Linear  # the class itself, which precisions of Lightning replace in `torch.nn` for a while

from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.techniques.core.facts import Facts, run_facts

_OWN_ATTENTION = ("eager", "sdpa")


def read_facts(module: nn.Module, *settings: Any, **options: Any) -> Facts:
    """Facts of a module; what needs the layers stays unknown if `configure_model` has yet to build them."""
    facts = run_facts(module, *settings, **options)
    if not any(True for _ in module.parameters()):
        return facts
    return replace(
        facts,
        num_blocks=sum(len(group.modules) for group in find_blocks(module)),
        causal_lm=any(is_causal_lm(child) for child in module.modules()),
        hugging_face=any(is_pretrained(child) for child in module.modules()),
        attention=_attention(module),
        mlp_width=min(map(mlp_width, find_mlps(module)), default=0),
    )


_MLP_CLASS = re.compile(r"(MLP|FFN|FeedForward|ActDense)$")

MLP_PATH = re.compile(r"\.(mlp|ffn|ff|feed_forward|feedforward|DenseReluDense)\.", re.IGNORECASE)
"""Where the names of weights say that they belong to a feed-forward layer."""


def find_mlps(module: nn.Module) -> list[nn.Module]:
    """Feed-forward layers that take one tensor, the outermost, by the names of their classes."""
    if _MLP_CLASS.search(type(module).__name__) and mlp_width(module) and _takes_one(module):
        return [module]
    return [layer for child in module.children() for layer in find_mlps(child)]


def mlp_width(layer: nn.Module) -> int:
    """Features of a token that goes into a feed-forward layer; 0 for one without products."""
    shapes = (getattr(weight, "ds_shape", weight.shape) for weight in layer.parameters())  # DeepSpeed's are divided
    return next((min(shape) for shape in shapes if len(shape) == 2), 0)


def _takes_one(layer: nn.Module) -> bool:
    parameters = inspect.signature(layer.forward).parameters.values()
    return len([one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]) == 1


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a `transformers.PreTrainedModel`, without importing transformers."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def is_causal_lm(module: Any) -> bool:
    """Whether a module is a Hugging Face model with one output head, as causal and encoder-decoder LMs have.

    How it computes its loss is not asked here: that shows when it runs.
    """
    if not is_pretrained(module):
        return False
    try:
        head = module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    return isinstance(head, Linear) and any(child is head for child in module.modules())


def outermost_pretrained(module: nn.Module) -> list[Any]:
    """Hugging Face models that are not part of another one."""
    if is_pretrained(module):
        return [module]
    return [model for child in module.children() for model in outermost_pretrained(child)]


def keep_attention(model: Any) -> Callable[[], None]:
    """Remember which implementation of attention a model and its parts have; return a function that puts it back."""
    configs = {id(child.config): child.config for child in model.modules() if is_pretrained(child)}
    before = [(config, config._attn_implementation) for config in configs.values()]

    def put_back() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation

    return put_back


def _attention(module: nn.Module) -> frozenset[str] | None:
    """What all models can switch to, found by switching and switching back; None if there is no model."""
    models = outermost_pretrained(module)
    if not models:
        return None
    return frozenset(name for name in _OWN_ATTENTION if all(_can_switch(model, name) for model in models))


def _can_switch(model: Any, name: str) -> bool:
    put_back = keep_attention(model)
    try:
        model.set_attn_implementation(name)
        return bool(model.config._attn_implementation == name)
    except (ValueError, ImportError):
        return False
    finally:
        put_back()
