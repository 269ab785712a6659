"""`without_weights`: models by their configurations alone, wherever a user's code loads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_memfit.estimate.architectures import known_configuration
from lightning_memfit.hub import asked_once
from lightning_memfit.profile.fake import fake_pretrained_weights
from lightning_memfit.profile.replaced import replaced

_OF_HUB = frozenset(
    {
        *("cache_dir", "force_download", "proxies", "token", "use_auth_token", "local_files_only", "revision"),
        *("trust_remote_code", "subfolder", "_from_pipeline", "_from_auto", "_commit_hash", "gguf_file"),
    }
)
"""Arguments that transformers takes for finding a configuration, and doesn't pass on."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Let transformers' `from_pretrained` give models on the meta device, without reading or fetching weights.

    Configurations of well-known models come from our table (`architectures.json`), others from a folder, the hub's
    cache, or the hub. Imports transformers.
    """
    from transformers import PretrainedConfig
    from transformers import modeling_utils as _  # noqa: F401  (what is replaced)

    original = PretrainedConfig.__dict__["get_config_dict"].__func__

    def get_config_dict(cls: Any, /, name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # What the table doesn't have: parts, other revisions than the newest, and a folder of that name.
        is_other = kwargs.get("subfolder") or kwargs.get("revision") not in (None, "main") or Path(str(name)).is_dir()
        known = None if is_other else known_configuration(str(name))
        if known is None:
            found: tuple[dict[str, Any], dict[str, Any]] = original(cls, name, **kwargs)
            return found
        return known, {key: value for key, value in kwargs.items() if key not in _OF_HUB}

    with (
        asked_once(),
        replaced(PretrainedConfig, "get_config_dict", classmethod(get_config_dict)),
        fake_pretrained_weights("meta"),
    ):
        yield
