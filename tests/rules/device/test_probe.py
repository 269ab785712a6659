import psutil
import pytest
import torch

from lightning_memfit.device.host import probe_host
from lightning_memfit.device.probe import probe_device
from lightning_memfit.memory import GIB, MIB


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def probe(tmp_path, proc):
    (tmp_path / "proc").write_text(proc)
    return probe_host(cgroup_root=tmp_path / "cgroup", proc_cgroup=tmp_path / "proc")


def test_cgroup_v2_limits_of_parents_hold(tmp_path):
    root = tmp_path / "cgroup"
    write(root / "job", memory__max=3 * GIB, memory__current=2 * GIB, memory__stat=f"anon 1\ninactive_file {512 * MIB}")
    write(root / "job" / "step", memory__max="max", memory__current=GIB, memory__stat="inactive_file 0")
    state = probe(tmp_path, "0::/job/step\n")
    assert state.total_bytes == 3 * GIB
    assert state.available_bytes == GIB + 512 * MIB


def test_cgroup_v1_limits_hold(tmp_path):
    root = tmp_path / "cgroup" / "memory"
    write(root, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB, memory__stat="total_inactive_file 0")
    write(
        root / "docker" / "x",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=600 * MIB,
        memory__stat=f"cache 5\ntotal_inactive_file {100 * MIB}",
    )
    state = probe(tmp_path, "11:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n")
    assert (state.total_bytes, state.available_bytes) == (GIB, GIB - 500 * MIB)


def test_a_container_sees_its_limit_at_the_root(tmp_path):
    write(tmp_path / "cgroup", memory__max=GIB, memory__current=0, memory__stat="inactive_file 0")
    assert probe(tmp_path, "0::/not/visible/here\n").total_bytes == GIB
    assert probe(tmp_path, "0::/../../outside\n").total_bytes == GIB


@pytest.mark.parametrize("proc", ["0::/\n", "3:memory:/gone\n", ""])
def test_without_a_limit_the_machine_counts(tmp_path, proc):
    state = probe(tmp_path, proc)
    assert state.total_bytes == psutil.virtual_memory().total
    assert 0 < state.available_bytes < state.total_bytes


def test_without_cuda_the_device_probe_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="No CUDA device"):
        probe_device()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_shows_in_the_state():
    before = probe_device()
    tensor = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    after = probe_device()
    assert after.allocated_bytes - before.allocated_bytes == tensor.numel()
    assert after.available_bytes <= before.available_bytes - tensor.numel() + 4 * MIB
    with pytest.raises(ValueError, match="index=99"):
        probe_device(99)
