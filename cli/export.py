"""`memfit export`: turn a checkpoint into a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_memfit.data.chat_template import ChatTemplate, read_template
from lightning_memfit.data.pairs import set_languages
from lightning_memfit.data.tokenization import load_tokenizer
from lightning_memfit.hub import asked_once
from lightning_memfit.models.trained import (
    ARCHITECTURE_KEY,
    export_adapters,
    export_folder,
    load_checkpoint,
    network_from_checkpoint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DATA = "datamodule_hyper_parameters"
_OF_CHATS = {"chat_template": "template", "date": "date", "template_options": "options"}
"""Arguments of data modules for chats, and what `ChatTemplate` calls them."""

_LANGUAGES = ("source_language", "target_language")


def main(argv: list[str]) -> int:
    """Write weights, configuration and tokenizer into a new folder."""
    parser = argparse.ArgumentParser(
        prog="memfit export",
        description="Write a Hugging Face folder that `from_pretrained` loads: weights, configuration and tokenizer.",
    )
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="checkpoint written by `memfit fit`")
    parser.add_argument("--folder", required=True, help="new or empty folder to write")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the one the checkpoint was trained with)")
    parser.add_argument("--adapters_only", action="store_true", help="write a peft folder of the adapters alone")
    arguments = parser.parse_args(argv)

    if arguments.adapters_only:
        folder = export_adapters(load_verified(arguments.ckpt_path), arguments.folder)
        print(f"Adapters: {folder}\nLoad them with `peft.PeftModel.from_pretrained(network, {str(folder)!r})`.")
        return 0

    trained = load_trained(arguments.ckpt_path, arguments.tokenizer)
    end_with_answers(trained)
    folder = export_folder(trained.network, arguments.folder, trained.tokenizer)
    kind = type(trained.network).__name__
    print(f"Model and tokenizer: {folder}\nLoad it with `transformers.{kind}.from_pretrained({str(folder)!r})`.")
    return 0


class Trained(NamedTuple):
    """A trained network, in evaluation mode, and what its data were made with."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    """With the chat template of the training in place of its own, if that was another one."""
    chats: dict[str, Any] | None
    """Arguments of the `ChatTemplate` of the training; None if it wasn't one on chats."""


def load_trained(ckpt_path: str, tokenizer: str | None) -> Trained:
    """Load the network of a checkpoint and the tokenizer that its data were made with.

    Args:
        ckpt_path: Checkpoint written by `memfit fit`; a sharded one is consolidated in memory.
        tokenizer: Tokenizer to use instead of the one named in the checkpoint.

    Raises:
        ValueError: If either cannot be read, or the tokenizer or its chat template is unknown.
    """
    checkpoint = load_verified(ckpt_path)
    data = checkpoint.get(_DATA, {})
    name = tokenizer or data.get("tokenizer")
    if name is None:
        raise ValueError(f"`ckpt_path={ckpt_path!r}` does not say which tokenizer its data had. Give `--tokenizer`.")
    chats = {ours: data[name] for name, ours in _OF_CHATS.items() if name in data} if "chat_template" in data else None
    with asked_once():
        loaded = load_tokenizer(name)
        if chats is not None:
            loaded.chat_template = read_template(loaded, chats["template"])
        if any(data.get(name) is not None for name in _LANGUAGES):
            set_languages(loaded, *(data.get(name) for name in _LANGUAGES))
        return Trained(network_from_checkpoint(checkpoint), loaded, chats)


def end_with_answers(trained: Trained) -> None:
    """Let a network that was trained on chats end where its answers ended, whoever generates with it.

    Base models know the end of a text alone, and templates end a turn with a token of their own (Qwen, Llama 3).
    """
    settings = getattr(trained.network, "generation_config", None)
    if trained.chats is None or settings is None:
        return
    end, known = ChatTemplate(trained.tokenizer, **trained.chats).end_of_answer, settings.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    if end not in known:
        settings.eos_token_id = [*known, end]


def load_verified(ckpt_path: str) -> dict[str, Any]:
    """Check a checkpoint and load it; a sharded one is consolidated in memory.

    Raises:
        ValueError: If it is missing, damaged, no checkpoint, or not one of a language model.
    """
    from lightning_memfit.strategies.checkpoints import consolidated
    from lightning_memfit.strategies.integrity import verify

    path = Path(ckpt_path).expanduser()
    verify(path)
    checkpoint = consolidated(path) if path.is_dir() else load_checkpoint(path)
    if ARCHITECTURE_KEY not in checkpoint:
        raise ValueError(f"`ckpt_path={ckpt_path!r}` is not a checkpoint of a CausalLM.")
    return checkpoint
