"""Tests that need DeepSpeed's asynchronous I/O compiled, which takes minutes."""

import pytest

from lightning_memfit.nvme.extensions import extensions_folder

needs_aio = pytest.mark.skipif(
    not (extensions_folder() / "async_io" / "async_io.so").is_file(),
    reason="async_io is not compiled: `make aio`, which takes minutes",
)
