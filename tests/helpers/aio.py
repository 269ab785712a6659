"""Tests that need DeepSpeed's asynchronous I/O compiled, which takes minutes, or what compiles it."""

import pytest

from lightning_memfit.device.health import build_tools
from lightning_memfit.nvme.extensions import extensions_folder

needs_aio = pytest.mark.skipif(
    not (extensions_folder() / "async_io" / "async_io.so").is_file(),
    reason="async_io is not compiled: `make aio`, which takes minutes",
)

_MISSING = [f"{finding.name} ({finding.fix})" for finding in build_tools() if finding.level != "ok"]

needs_aio_tools = pytest.mark.skipif(bool(_MISSING), reason=f"async_io can't be compiled without {', '.join(_MISSING)}")
