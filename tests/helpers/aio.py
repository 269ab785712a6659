"""Tests that need DeepSpeed's asynchronous I/O compiled, which takes minutes, or what compiles it."""

from pathlib import Path

import pytest

from lightning_memfit.device.health import build_tools

AIO_REASON = "async_io is not compiled: `make aio`, which takes minutes"


def aio_is_compiled() -> bool:
    """Whether it is there."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("async_io", False), "async_io.so").is_file()


needs_aio = pytest.mark.skipif(not aio_is_compiled(), reason=AIO_REASON)

_MISSING = [f"{finding.name} ({finding.fix})" for finding in build_tools() if finding.level != "ok"]

needs_aio_tools = pytest.mark.skipif(bool(_MISSING), reason=f"async_io can't be compiled without {', '.join(_MISSING)}")
