"""`memfit generate`: continue a text with a trained model, or let it answer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trained import Trained


def main(argv: list[str]) -> int:
    """Print a prompt and its continuation, or the answer of a model that was trained on chats."""
    parser = argparse.ArgumentParser(
        prog="memfit generate",
        description="Continue a text with a trained model. One that was trained on chats answers it.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt_path", metavar="FILE", help="checkpoint written by `memfit fit`")
    source.add_argument("--folder", help="Hugging Face folder, as `memfit export` writes it")
    parser.add_argument("--prompt", default="", help="text to continue or answer (default: start a new document)")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the one the checkpoint was trained with)")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt into the chat template, and print the answer (default: if the model was trained on chats; "
        "with --folder, if its tokenizer has a template)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt, in a chat")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="sample from this many tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.folder and arguments.tokenizer:
        parser.error("--folder has its own tokenizer: leave --tokenizer out")

    import torch

    from lightning_memfit.models.sampling import check_sampling, continue_text

    from .trained import load_exported, load_trained

    limits = (arguments.max_new_tokens, arguments.temperature, arguments.top_k)
    check_sampling(*limits)  # before a model is read
    if arguments.folder:
        trained = load_exported(arguments.folder)
    else:
        trained = load_trained(arguments.ckpt_path, arguments.tokenizer)
    is_chat = trained.chats is not None if arguments.chat is None else arguments.chat
    if arguments.system is not None and not is_chat:
        raise ValueError(
            "`--system` is for chats, and this prompt is continued as plain text. Drop it or add `--chat`."
        )
    torch.manual_seed(arguments.seed)
    if is_chat:
        print(_answer(trained, arguments.prompt, arguments.system, limits))
    else:
        print(continue_text(trained.network, trained.tokenizer, arguments.prompt, *limits))
    return 0


def _answer(trained: Trained, prompt: str, system: str | None, limits: tuple[int, float, int]) -> str:
    """Return what a model answers in a chat.

    Raises:
        ValueError: If there is no prompt or no chat template, or the template refuses the messages.
    """
    from lightning_memfit.data.chat_template import ChatTemplate
    from lightning_memfit.models.sampling import continue_ids

    if not prompt:
        raise ValueError("`--prompt` is empty: a chat needs something to answer. `--no-chat` starts a new document.")
    network, tokenizer, chats = trained
    if tokenizer.chat_template is None:
        raise ValueError(
            "`--chat`: the model was not trained on chats, and its tokenizer has no chat template. Leave `--chat` out, "
            "which continues the prompt as plain text."
        )
    template = ChatTemplate(tokenizer, **(chats or {}))
    messages = [{"role": "system", "content": system}] if system is not None else []
    ids = template.prompt([*messages, {"role": "user", "content": prompt}])
    return str(
        tokenizer.decode(
            continue_ids(network, tokenizer, ids, *limits, ends=[template.end_of_answer]), skip_special_tokens=True
        )
    )
