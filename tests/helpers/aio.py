"""Whether DeepSpeed's asynchronous I/O is compiled here; to compile it takes minutes."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root


def built() -> bool:
    """Look where torch keeps compiled extensions, as it does when DeepSpeed asks for one."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cuda = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    default = Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}_{cuda}"
    return (Path(named) if named else default).joinpath("async_io", "async_io.so").is_file()


needs_aio = pytest.mark.skipif(not built(), reason="async_io is not compiled: `make aio`, which takes minutes")
