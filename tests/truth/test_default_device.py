"""What has to lie in host memory does so under `torch.set_default_device("cuda")`, too; "meta" stands for it here."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from lightning_memfit.checkpointing import offload
from lightning_memfit.memory.comparison import projected
from lightning_memfit.reliability.consensus import RankConsensus
from lightning_memfit.strategies import shards


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another default device; memory is pinned by nobody, as only a process with a device can."""
    for name in ("empty", "empty_strided", "tensor"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, pin_memory=False, **options: make(*a, **options))
    with torch.device("meta"):
        yield


def host(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cpu")


def test_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    copied = offload._HostCopy._copy_out(SimpleNamespace(_stream=stream, _device=None), host(1.0, 2.0))
    assert torch.equal(copied, host(1.0, 2.0))


def test_projections() -> None:
    assert projected(host(1.0, 2.0)).device.type == "cpu"


def test_what_ranks_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def all_gather(theirs: list[torch.Tensor], mine: torch.Tensor, **_: Any) -> Any:
        theirs[0].copy_(mine)
        sent.append(mine)
        return SimpleNamespace(wait=lambda patience: True)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flags, **_: sent.append(flags))
    ranks = RankConsensus(1)
    ranks._group = object()  # type: ignore[assignment]
    assert ranks.exchange(3, 4) == [[3, 4]]
    assert ranks.any_of([True, False]) == [True, False]
    assert {one.device.type for one in sent} == {"cpu"}


def test_what_strategies_load() -> None:
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), [])
    folder = SimpleNamespace(_metadata=SimpleNamespace(state_dict_metadata={"a": entry}), keys={("a",): "a"})
    made = shards._Folder._empty(folder, ("a",))  # type: ignore[arg-type]
    assert made is not None
    assert made.device.type == "cpu"
