"""`memfit export`: turn a checkpoint into a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from .arguments import command_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DATA = "datamodule_hyper_parameters"
_OF_CHATS = {"chat_template": "template", "template_options": "options"}
"""Arguments of data modules for chats, and what `ChatTemplate` calls them."""

_LANGUAGES = ("source_language", "target_language")


def main(argv: list[str]) -> int:
    """Write weights, configuration and tokenizer into a new folder."""
    what = "Write a Hugging Face folder that `from_pretrained` loads: weights, configuration and tokenizer."
    parser = command_parser("export", what)
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="checkpoint written by `memfit fit`")
    parser.add_argument("--folder", required=True, help="new or empty folder to write")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the one the checkpoint was trained with)")
    parser.add_argument("--adapters_only", action="store_true", help="write a peft folder of the adapters alone")
    arguments = parser.parse_args(argv)

    if arguments.adapters_only:
        folder = export_adapters(load_verified(arguments.ckpt_path), arguments.folder)
        print(f"Adapters: {folder}\nLoad them with `peft.PeftModel.from_pretrained(network, {str(folder)!r})`.")
        return 0

    path, checkpoint = arguments.ckpt_path, load_verified(arguments.ckpt_path)
    name = arguments.tokenizer or checkpoint.get(_DATA, {}).get("tokenizer")
    if name is None:
        raise ValueError(f"`ckpt_path={path!r}` does not say which tokenizer its data had. Give `--tokenizer`.")
    with asked_once():
        tokenizer = tokenizer_of(checkpoint, name)
        network = network_from_checkpoint(checkpoint)
    end_with_answers(network, tokenizer, chats_of(checkpoint))
    folder = export_folder(network, arguments.folder, tokenizer)
    kind = type(network).__name__
    print(f"Model and tokenizer: {folder}\nLoad it with `transformers.{kind}.from_pretrained({str(folder)!r})`.")
    return 0


def tokenizer_of(checkpoint: dict[str, Any], name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer, with the chat template and the languages of a checkpoint's data in place of its own."""
    data, chats = checkpoint.get(_DATA, {}), chats_of(checkpoint)
    tokenizer = load_tokenizer(name)
    if chats is not None:
        tokenizer.chat_template = read_template(tokenizer, chats["template"])
    if any(data.get(name) is not None for name in _LANGUAGES):
        set_languages(tokenizer, *(data.get(name) for name in _LANGUAGES))
    return tokenizer


def chats_of(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of the `ChatTemplate` of the training; None if it wasn't one on chats."""
    data = checkpoint.get(_DATA, {})
    return {ours: data[name] for name, ours in _OF_CHATS.items() if name in data} if "chat_template" in data else None


def end_with_answers(network: Any, tokenizer: PreTrainedTokenizerBase, chats: dict[str, Any] | None) -> None:
    """Let a network that was trained on chats end where its answers ended, whoever generates with it.

    Base models know the end of a text alone, and templates end a turn with a token of their own (Qwen, Llama 3).
    """
    settings = getattr(network, "generation_config", None)
    if chats is None or settings is None:
        return
    end, known = ChatTemplate(tokenizer, **chats).end_of_answer, settings.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    if end not in known:
        settings.eos_token_id = [*known, end]


def load_verified(ckpt_path: str) -> dict[str, Any]:
    """Check a checkpoint and load it; a sharded one is consolidated in memory."""
    from lightning_memfit.strategies.checkpoint_io import consolidated
    from lightning_memfit.strategies.integrity import verify

    path = Path(ckpt_path).expanduser()
    verify(path)
    checkpoint = consolidated(path) if path.is_dir() else load_checkpoint(path)
    if ARCHITECTURE_KEY not in checkpoint:
        raise ValueError(f"`ckpt_path={ckpt_path!r}` is not a checkpoint of a CausalLM.")
    return checkpoint
