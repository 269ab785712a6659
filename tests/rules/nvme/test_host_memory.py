from lightning_memfit.estimate.deepspeed import DeepSpeedMemory
from lightning_memfit.memory import GIB, Category, MemoryBreakdown, Tier
from lightning_memfit.nvme.preflight import host_memory

PINNED = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: 3 * GIB})
MOMENTS = {
    "passes": PINNED + MemoryBreakdown.device({Category.TEMPORARY: 5 * GIB}),
    "update": PINNED + MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: GIB}),
}
MEMORY = DeepSpeedMemory(MOMENTS, PINNED, on_cpu=True)


def test_refusal_says_when_what_for_and_how_much_is_missing() -> None:
    finding = host_memory(MEMORY, 2, 6 * GIB, "buy more")
    assert finding.level == "problem"
    assert finding.fix == "buy more"
    assert finding.found == (
        "16.00 GiB needed by 2 ranks in the moment 'passes' (each 5.00 GiB device temporary, 3.00 GiB pinned host "
        "communication), and activations, 6.00 GiB free"
    )
    assert host_memory(MEMORY, 1, 8 * GIB, "").level == "ok"
