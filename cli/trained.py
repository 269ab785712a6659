"""Load a trained network and its tokenizer from a checkpoint or an exported folder, for `export` and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.data.tokenization import load_tokenizer
from lightning_memfit.hub import asked_once
from lightning_memfit.models.architecture import auto_class
from lightning_memfit.models.trained import load_checkpoint, network_from_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DATA = "datamodule_hyper_parameters"


def load_trained(ckpt_path: str, tokenizer: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the network of a checkpoint and the tokenizer that its data were made with.

    Args:
        ckpt_path: Checkpoint written by `memfit fit`; a sharded one is consolidated in memory.
        tokenizer: Tokenizer to use instead of the one named in the checkpoint.

    Raises:
        ValueError: If either cannot be read, or the tokenizer is unknown.
    """
    checkpoint = load_verified(ckpt_path)
    name = tokenizer or checkpoint.get(_DATA, {}).get("tokenizer")
    if name is None:
        raise ValueError(f"`ckpt_path={ckpt_path!r}` does not say which tokenizer its data had. Give `--tokenizer`.")
    with asked_once():
        return network_from_checkpoint(checkpoint), load_tokenizer(name)


def load_verified(ckpt_path: str) -> dict[str, Any]:
    """Check a checkpoint and load it; a sharded one is consolidated in memory.

    Raises:
        ValueError: If it is missing, damaged or no checkpoint.
    """
    from lightning_memfit.strategies.checkpoints import consolidated
    from lightning_memfit.strategies.integrity import verify

    path = Path(ckpt_path).expanduser()
    verify(path)
    return consolidated(path) if path.is_dir() else load_checkpoint(path)


def load_exported(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Hugging Face folder, as `memfit export` writes it.

    Raises:
        ValueError: If the folder is missing or incomplete.
    """
    from transformers import AutoConfig

    if not Path(folder).is_dir():
        raise ValueError(f"`--folder {folder}`: there is no such folder.")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        network = auto_class(config).from_pretrained(folder, dtype="auto", trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"`--folder {folder}` is not a complete Hugging Face folder: {error}") from error
    return network.eval(), load_tokenizer(folder)
