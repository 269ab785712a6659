"""`profile_named`: the profile of a model that is given by a name or a configuration alone.

A profile in the disk cache is read without torch; otherwise `named_model` builds the model without memory and traces
it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.estimate.architectures import Architecture, Kind, NamedRun, find_architecture, is_known
from lightning_memfit.hub import read_config
from lightning_memfit.optim import optimizers
from lightning_memfit.profile.cache import ProfileCache, text_key
from lightning_memfit.profile.fingerprint import describe, describe_processor
from lightning_memfit.profile.record import ModelProfile

if TYPE_CHECKING:
    from lightning_memfit.profile.ranks import Ranks

_ENDINGS: dict[str, Kind] = {
    "LMHeadModel": "causal",
    "ForCausalLM": "causal",
    "WhisperForConditionalGeneration": "speech recognition",
    "ForConditionalGeneration": "encoder-decoder",
    "ForSequenceClassification": "text classification",
    "ForMaskedLM": "masked",
    "ForImageClassification": "image classification",
}


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""How configurations name the longest sequence."""


_MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor of a traced batch. It is real memory, and `profile.integers` carries the values of
four times as many."""


def architecture_of(model: str) -> Architecture:
    """Find the architecture that a name, a folder or a file gives.

    Raises:
        ValueError: If there is none, or it is unknown what batch its class takes.
    """
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" or path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"`--model {path}` is no readable Hugging Face configuration: {error}.") from error
        return _read(str(path), config)
    if is_known(model) or "/" not in model:
        return find_architecture(model)
    try:
        return _read(model, read_config(model))
    except LookupError as error:
        try:
            find_architecture(model)  # always raises: it names the closest
        except ValueError as unknown:
            raise ValueError(f"{unknown} (On the hub: {error}.)") from error
        raise


def _read(name: str, config: dict[str, Any]) -> Architecture:
    names = config.get("architectures") or []
    ending = next((key for key in _ENDINGS if names and names[0].endswith(key)), None)
    if ending is None or "model_type" not in config:
        raise ValueError(
            f"`--model {name}`: its config.json must have a `model_type` and name its class in `architectures`, ending "
            f"in one of {', '.join(_ENDINGS)} (found {names})."
        )
    kind = _ENDINGS[ending]
    longest = next((config[key] for key in _POSITIONS if key in config), None)
    usual = None if kind == "image classification" else min(longest or 512, 2048)
    return Architecture(name, names[0], config["model_type"], config, kind, 0, usual, longest, name)


def profile_named(
    run: NamedRun,
    cache: ProfileCache | None = None,
    shorten: bool = True,
    callbacks: Callable[[], tuple[Any, ...]] = tuple,
    ranks: "Ranks | None" = None,
) -> ModelProfile:
    """Profile a named model without weights.

    Its batch is real, so that of a very large micro-batch a smaller one is traced; the profile then knows every size.

    Raises:
        ValueError: If the model is unknown, or can't take that sequence length; or if the micro-batch is very large,
            and nothing follows for it from smaller ones.
    """
    architecture = architecture_of(run.model)
    _check_length(run, architecture)
    wanted, traced = run.micro_batch_size, max(1, _MOST_ELEMENTS // _elements_per_sample(run, architecture))
    run = replace(run, micro_batch_size=min(wanted, traced))
    key = _key(run, architecture, shorten, ranks) if cache is not None else ""
    profile = cache.load(key) if cache is not None else None
    if profile is None:
        from lightning_memfit.estimate.named_model import trace_named

        profile = trace_named(run, architecture, shorten, callbacks(), ranks)
        if cache is not None:
            cache.save(key, profile)
    profile.events_at(wanted)  # refuses a size of which nothing is known
    return profile


def _elements_per_sample(run: NamedRun, architecture: Architecture) -> int:
    """Elements of a sample's largest tensor in the batch."""
    length, config = run.sequence_length or architecture.sequence_length, architecture.config
    if architecture.kind == "speech recognition":
        return int(config.get("num_mel_bins", 80)) * 2 * int(config.get("max_source_positions", 1500))
    return length or 3 * int(architecture.config.get("image_size", 224)) ** 2


def _check_length(run: NamedRun, architecture: Architecture) -> None:
    wanted, longest = run.sequence_length, architecture.max_sequence_length
    if wanted is None:
        return
    if architecture.sequence_length is None:
        raise ValueError(
            f"`sequence_length={wanted}`: {architecture.name} takes images, which have none. Leave it out."
        )
    if wanted > _MOST_ELEMENTS:
        raise ValueError(f"`sequence_length={wanted}`: at most {_MOST_ELEMENTS:,} tokens are traced. Choose fewer.")
    if longest is not None and wanted > longest:
        raise ValueError(f"`sequence_length={wanted}` is longer than the {longest} positions of {architecture.name}.")


def _key(run: NamedRun, architecture: Architecture, shorten: bool, ranks: "Ranks | None") -> str:
    own = [Path(__file__), Path(__file__).with_name("named_model.py"), Path(optimizers.__file__)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()
    of_ranks = describe(ranks.settings()) if ranks is not None else None
    return text_key("named", asdict(run), asdict(architecture), shorten, code, describe_processor(run.device), of_ranks)
