from lightning_memfit.memory import GIB, Category, MemoryBreakdown, Tier
from lightning_memfit.nvme.peaks import device_peak_bytes, host_peak, host_peak_bytes, host_tiers, largest_parts
from lightning_memfit.nvme.preflight import check_host_memory

PINNED = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: 3 * GIB})
MOMENTS = {
    "passes": PINNED + MemoryBreakdown.device({Category.TEMPORARY: 5 * GIB}),
    "update": PINNED + MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: GIB}),
}


def test_the_cpus_device_memory_is_host_memory() -> None:
    assert host_peak(MOMENTS, on_cpu=True)[0] == "passes"
    assert host_peak_bytes(MOMENTS, on_cpu=True) == 8 * GIB
    assert host_peak(MOMENTS, on_cpu=False)[0] == "update"
    assert host_peak_bytes(MOMENTS, on_cpu=False) == 4 * GIB
    assert device_peak_bytes(MOMENTS) == 5 * GIB


def test_disk_is_no_memory() -> None:
    moments = {"kept": MemoryBreakdown.on(Tier.DISK, {Category.GRADIENT: GIB})}
    assert host_peak_bytes(moments, on_cpu=True) == 0


def test_refusal_says_when_what_for_and_how_much_is_missing() -> None:
    name, peak = host_peak(MOMENTS, on_cpu=True)
    parts = largest_parts(peak, host_tiers(on_cpu=True))
    finding = check_host_memory(16 * GIB, 6 * GIB, 2, name, parts, "buy more")
    assert finding.level == "problem"
    assert finding.fix == "buy more"
    assert finding.found == (
        "16.00 GiB needed by 2 ranks in the moment 'passes' (each 5.00 GiB device temporary, 3.00 GiB pinned host "
        "communication), and activations; 6.00 GiB free, 10.00 GiB too few"
    )
    assert check_host_memory(GIB, GIB, 1, name, parts, "").level == "ok"
