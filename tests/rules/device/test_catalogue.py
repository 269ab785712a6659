import pytest
import torch

from lightning_memfit.device.catalogue import DEVICES, DeviceSpec, find_device
from lightning_memfit.memory import GIB


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 3060", "RTX 3060 12GB"),
        ("3060", "RTX 3060 12GB"),
        ("3060ti", "RTX 3060 Ti"),
        ("4070 Ti Super", "RTX 4070 Ti Super"),
        ("RTX 4070 TiS", "RTX 4070 Ti Super"),
        ("H100", "H100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("nvidia h200 141gb", "H200 141GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX 3090 24GB", "RTX 3090"),
        ("A40 48GB", "A40"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
    ],
)
def test_names_are_found_as_people_and_drivers_write_them(written, name):
    assert find_device(written).name == name


def test_every_device_is_found_by_its_own_names():
    for spec in DEVICES:
        for name in spec.names:
            assert find_device(name) is spec, name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("A100", "fits several: A100 40GB, A100 80GB. Name one"),
        ("RTX 4060 Ti", "fits several: RTX 4060 Ti 8GB, RTX 4060 Ti 16GB"),
        ("RTX 4091", "unknown. Closest: .*RTX 4090"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "unknown"),
        ("3060 8GB", "unknown"),
        ("", "unknown"),
        ("banana", "12GiB"),
        ("AMD Instinct MI300X", "AMD devices are not modelled"),
    ],
)
def test_other_names_are_refused_with_candidates(written, message):
    with pytest.raises(ValueError, match=message):
        find_device(written)


def test_a_size_is_a_device():
    spec = find_device("12GiB")
    assert (spec.memory_bytes, spec.bandwidth_bytes_per_s) == (12 * GIB, None)
    with pytest.raises(ValueError, match="no known rate"):
        spec.flops_for(torch.float32)


def test_entries_are_plausible():
    assert len({spec.name for spec in DEVICES}) == len(DEVICES) > 40
    for spec in DEVICES:
        assert 7 * GIB < spec.memory_bytes < 300 * GIB
        assert spec.source
        assert 200e9 < spec.bandwidth_bytes_per_s < 10e12
        assert spec.flops_for(torch.float32) >= 8e12
        assert 10e9 < spec.host_link_bytes_per_s < 500e9
        if spec.compute_capability >= (8, 0):
            assert spec.flops_for(torch.bfloat16) == spec.flops_for("float16") > spec.flops_for("float32")
        if "GB" in spec.name:
            marketed = int(spec.name.split("GB")[0].split()[-1])
            assert 0.9 * marketed <= spec.memory_bytes / GIB <= marketed


def test_fp8_has_one_name_for_both_formats():
    assert find_device("H100").flops_for(torch.float8_e4m3fn) == find_device("H100").flops_for("float8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_card_at_hand_is_described_rightly():
    properties = torch.cuda.get_device_properties(0)
    spec = find_device(properties.name)
    assert spec.memory_bytes == pytest.approx(properties.total_memory, rel=0.02)
    assert spec.compute_capability == (properties.major, properties.minor)


def test_training_reaches_a_share_of_the_data_sheet() -> None:
    for name, share in (("H200", 0.66), ("RTX 3060", 0.8)):
        spec = find_device(name)
        reached = spec.reached()
        assert {dtype: rate / spec.flops[dtype] for dtype, rate in reached.flops.items()} == pytest.approx(
            {dtype: 0.78 if dtype == "float32" else share for dtype in spec.flops}
        )
        assert spec.bandwidth_bytes_per_s is not None
        assert reached.bytes_per_s == 0.85 * spec.bandwidth_bytes_per_s
    assert DeviceSpec("bare", 1 << 30).reached().bytes_per_s is None
