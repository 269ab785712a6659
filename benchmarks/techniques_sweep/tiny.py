"""Every causal language model and encoder-decoder of transformers, built small from its configuration class.

There is no list of architectures or of their settings here: a configuration's fields are shrunk by what they are
called. What doesn't build that way is reported.
"""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 97
SAMPLES, LENGTH = 2, 12
MOST_PARAMETERS = 4_000_000

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(\w*vocab_size|vocab_size_\w+|num_embeddings)$", VOCABULARY),
    (r"(num_hidden_layers|n_layers?|num_layers|\w*encoder_layers|\w*decoder_layers|num_blocks|depth)$", 2),
    (r"num_(encoder|decoder)_layers$", 2),
    (r"(num_nextn_predict_layers|num_mtp_\w+|num_kv_shared_layers|first_k_dense_replace|num_dense_layers)$", 0),
    (r"(num_(key_value|kv|global_key_value|query_key_value)_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$", 2),
    (r"(\w*attention_heads|n_heads?|num_heads|mamba_num_heads|mamba_n_heads|linear_num_\w+_heads)$", 4),
    (r"(n_groups?|topk_group|n_group|num_expert_group\w*|mamba_n_groups|n_mamba_heads)$", 1),
    (r"(num_experts_per_tok\w*|num_selected_experts|moe_topk|moe_k|top_k_experts|experts_per_token)$", 2),
    (r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|expert_num|num_experts_\w+)$", 4),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
    (r"(qk_rope_head_dim|rotary_dim|rope_head_dim)$", 4),
    (r"(head_dim|qk_nope_head_dim|v_head_dim|d_kv|d_head|attention_head_dim|global_head_dim)$", 8),
    (r"(linear_(key|value)_head_dim|mamba_headdim|mamba_head_dim|mamba_d_head)$", 16),
    (r"(max_pos_emb)$", 64),
    (r"(state_size|mamba_d_state|ssm_state_size|d_state|time_step_rank|\w*_rank)$", 8),
    (r"(intermediate_size|\w*_intermediate_size|d_ff|\w*ffn_dim|\w*ffn_hidden_size|d_inner|n_inner|inner_dim)$", 48),
    (r"(d_model|hidden_size|n_embd|embed_dim|embedding_size|\w*hidden_dim|lru_width|dim|width|emb_dim)$", 32),
    (r"(\w*_hidden_size|\w*_embed_dim|hidden_size_\w+|projection_dim|output_dim|input_dim|\w*_embd)$", 32),
    (r"(max_\w*positions?\w*|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|context_length)$", 64),
    (r"(sliding_window|attention_window|local_attention|window_size|attention_window_size|chunk_size)$", 8),
    (r"(image_size|patch_size|spatial_patch_size)$", 8),
)
"""What a field's name means, and how large it is here. The first that fits counts."""

_OFF = re.compile(r"(drop|jitter|layerdrop|noise)")
_SPECIAL = re.compile(r"_(token|tokens)_(id|index)$|_token_?ids?$|^forced_\w+_id$")
_KEPT_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class NotBuilt(Exception):
    """Why there is no small model of an architecture."""


def architectures() -> dict[str, str]:
    """Name of the class that trains by model type; encoder-decoders have `+` after the type if it has both."""
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = {kind: _first(name) for kind, name in causal.items()}
    for kind, name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items():
        found[f"{kind}+" if kind in found else kind] = _first(name)
    return found


def _first(name: Any) -> str:
    return str(name if isinstance(name, str) else name[0])


def is_encoder_decoder(name: str) -> bool:
    """Whether a name of `architectures` is that of an encoder-decoder."""
    from transformers.models.auto import modeling_auto as auto

    seq2seq = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return name.endswith("+") or (name in seq2seq and name not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A small model with random weights, in training mode, and a batch on which it computes a loss.

    Raises:
        NotBuilt: If none of the ways of shrinking its configuration gives a model that computes a finite loss.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    try:
        kind, cls = CONFIG_MAPPING[name.removesuffix("+")], getattr(transformers, architectures()[name])
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    if (name, seed) in _FOUND:
        config, form = _FOUND[name, seed]
        return _fresh(cls, copy.deepcopy(config), seed), make_batch(form, seed)
    problems: list[str] = []
    for make in _ways(kind):
        try:
            config = make()
            if not is_encoder_decoder(name) and getattr(config, "is_decoder", None) is False:
                config.is_decoder = True
            for special, token in _KEPT_SPECIAL.items() if is_encoder_decoder(name) else ():
                if getattr(config, special, None) is None:
                    setattr(config, special, token)
            text = config if is_encoder_decoder(name) else config.get_text_config()
            config = text if "ForCausalLM" in cls.__name__ else config
            pristine = copy.deepcopy(config)
            _FOUND[name, seed] = pristine, _checked_form(cls, config, seed)
            return build(name, seed)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    raise NotBuilt(problems[0])


_FOUND: dict[tuple[str, int], tuple[Any, str]] = {}
"""Configuration and form of the batch that worked: reference implementations of kernels take seconds for each try."""


def _fresh(cls: Any, config: Any, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: torch.nn.Module = cls(config).float()
    return model.train()


def _checked_form(cls: Any, config: Any, seed: int) -> str:
    """The form of batch on which a model computes a finite loss."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise NotBuilt(f"{count:,} parameters")
    model = _fresh(cls, config, seed)
    form = next(form for form in _FORMS if _computes(model, make_batch(form, seed)) or form == _FORMS[-1])
    batch = make_batch(form, seed)
    loss = model(**batch).loss
    if loss is None:
        raise NotBuilt("no loss for `labels`")
    if not torch.isfinite(loss):
        raise NotBuilt(f"loss {float(loss)}")
    loss.backward()
    return form


def _computes(model: Any, batch: dict[str, Tensor]) -> bool:
    try:
        model(**batch)
    except Exception:
        return False
    return True


_FORMS = ("own labels", "same tokens", "token types")
"""What a batch holds besides tokens: labels of another length, as an encoder-decoder takes them, or the tokens."""


def make_batch(form: str, seed: int) -> dict[str, Tensor]:
    """Random tokens, some of whose labels don't count."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Tensor:
        return torch.randint(20, VOCABULARY, (SAMPLES, length), generator=generator)

    inputs = tokens(LENGTH)
    labels = tokens(LENGTH - 4) if form == "own labels" else inputs.clone()
    labels[0, -3:] = -100
    batch = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}
    return batch | ({"token_type_ids": torch.zeros_like(inputs)} if form == "token types" else {})


# --- shrinking a configuration --------------------------------------------------------------------------------------


def _ways(kind: Any) -> list[Callable[[], Any]]:
    """Functions that make a small configuration of a class, the likeliest to work first."""

    def by(also: Mapping[str, Any] | None = None, layers: int = 2, derived: bool = False) -> Callable[[], Any]:
        return lambda: kind(**shrunk(kind, also, layers, derived))

    return [
        by(),
        by(derived=True),
        by({"use_cache": False}),
        by({"num_key_value_heads": 4}),
        by({"head_dim": 16}),
        by({"rotary_dim": 8, "qk_rope_head_dim": 8}),
        by(layers=4),
        by(layers=6, derived=True),
        by(layers=8, derived=True),
        lambda: _assigned(kind),
        by({"hidden_size": 64, "head_dim": 16, "d_model": 64}),
        by({"hidden_size": 64}, derived=True),
    ]


def shrunk(kind: Any, also: Mapping[str, Any] | None = None, layers: int = 2, derived: bool = False) -> dict[str, Any]:
    """Small values for those fields of a configuration class that have a size in their name.

    Args:
        kind: The class.
        also: Values for fields of these names, where there are any.
        layers: Number of layers of each stack.
        derived: Leave out what the class makes of other fields where it isn't given.
    """
    from transformers import PreTrainedConfig

    also = also or {}
    default = kind()
    names = [name for name, one in _fields(kind).items() if _has(default, name) and not (derived and one is None)]
    given: dict[str, Any] = {}
    special = 3
    was_deep = {getattr(default, n) for n in names if _small(n, 64) == 2 and "layers" in n + "s"}
    for name in names:
        value = getattr(default, name)
        if name in getattr(kind, "sub_configs", {}) or isinstance(value, PreTrainedConfig):
            given[name] = None if value is None else _sub(value, also, layers, derived)
        elif isinstance(value, bool) or name in ("transformers_version", "problem_type"):
            continue
        elif name in _KEPT_SPECIAL:
            given[name] = _KEPT_SPECIAL[name]
        elif _SPECIAL.search(name):
            if isinstance(value, int):
                given[name], special = special, special + 1
        elif isinstance(value, float) and _OFF.search(name):
            given[name] = 0.0
        elif isinstance(value, int):
            small = _small(name, value)
            if re.match(_SIZES[1][0], name) or re.match(_SIZES[2][0], name):
                small = min(value, layers)
            if small is not None:
                given[name] = small
        elif isinstance(value, (list, tuple)) and len(value) in was_deep and len(value) > layers:
            given[name] = type(value)(_one_of_each(list(value), layers))
    return given | {name: value for name, value in also.items() if name in names}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # some refuse to be asked for what differs between layers
        return False


def _sub(value: Any, also: Mapping[str, Any], layers: int, derived: bool) -> Any:
    kind = type(value)
    return kind(**shrunk(kind, also, layers, derived)) if not isinstance(value, dict) else value


def _assigned(kind: Any) -> Any:
    """A configuration made by its defaults, whose fields are set afterwards."""
    config = kind()
    for name, value in shrunk(kind).items():
        setattr(config, name, value)
    return config


def _fields(kind: Any) -> dict[str, Any]:
    """Names of fields, and their defaults as they are written."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind)}
    parameters = inspect.signature(kind.__init__).parameters
    return {name: one.default for name, one in parameters.items() if name not in ("self", "kwargs")}


def _small(name: str, value: int) -> int | None:
    for pattern, size in _SIZES:
        if re.match(pattern, name):
            return min(value, size) if value > 0 else None
    if value >= 512:  # whatever it is, it is large
        return 32
    return None


def _one_of_each(values: list[Any], count: int) -> list[Any]:
    """As many values, with every distinct one as long as there is room."""
    try:
        distinct = list(dict.fromkeys(values))
    except TypeError:
        return values[:count]
    return (distinct + values)[:count] if len(distinct) > 1 else values[:count]
