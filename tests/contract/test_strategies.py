"""Strategies as records: what they refuse, what they move, and the YAML they stand for."""

import inspect
from dataclasses import replace

import pytest

from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.techniques.core.facts import Facts, Run
from lightning_memfit.techniques.core.registry import STRATEGIES, TECHNIQUES, find_technique
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import CallbackSpec
from tests.rules.planner.made import MadeTraceStore, made_workload

NAMES = [strategy.name for strategy in STRATEGIES]
CPU = Run(Facts(device="cpu"))
EIGHT_BIT = Run(callbacks=("Optimizer8bit",))
REFUSED = {
    "fsdp2": (Run(precision="16-mixed"), "16-mixed"),
    "zero_2": (Run(Facts(gradient_clip_val=1.0, gradient_clip_algorithm="value")), "norm only"),
    "zero_3": (Run(Facts(optimizers=("SGD", "SGD"))), "steps one optimizer"),
    "zero_1": (replace(CPU, precision="16-mixed"), "no float16 on the CPU"),
    "zero_offload": (CPU, "are one"),
    "zero_3_offload": (EIGHT_BIT, "8 bits are slow"),
    "zero_infinity": (EIGHT_BIT, "lost silently"),
}


@pytest.fixture(scope="module")
def profile():
    made = MadeTraceStore(made_workload(1000)).plain()
    return replace(made, parameters=(ParameterInfo("weight", 1000, 4),))


def cost(profile, name: str, world_size: int, precision: str = "bf16_mixed"):
    return Setting(world_size=world_size).choose(name).choose(precision).cost(profile)


def test_names_are_no_techniques():
    assert not {technique.name for technique in TECHNIQUES} & set(NAMES)
    assert all(strategy.kind == "strategy" and strategy.sharding is not None for strategy in STRATEGIES)
    assert find_technique("zero_2") is STRATEGIES[NAMES.index("zero_2")]


@pytest.mark.parametrize("name", NAMES)
def test_yaml_names_a_class_and_its_arguments(name):
    trainer = Setting(world_size=4).choose(name).overlay()["trainer"]
    spec = CallbackSpec(trainer["strategy"]["class_path"], trainer["strategy"].get("init_args", {}))
    known = {key for cls in spec.load().__mro__ for key in inspect.signature(cls.__init__).parameters}
    assert set(spec.init_args) <= known
    assert (trainer["devices"], trainer["num_nodes"]) == (4, 1)


def test_machines_share_the_devices():
    trainer = Setting(world_size=16).choose("fsdp2", num_nodes=2).overlay()["trainer"]
    assert (trainer["devices"], trainer["num_nodes"]) == (8, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name):
    run, message = REFUSED[name]
    assert message in str(find_technique(name).unsupported(run, {}))


@pytest.mark.parametrize(
    ("strategy", "other", "message"),
    [
        ("zero_2", "gradient_release", "reduces gradients across devices"),
        ("ddp", "host_master_weights", "Use one device"),
        ("zero_3", "chunked_loss", "ZeRO-3 has put it away"),
        ("zero_1", "optimizer_8bit", "keep_32bit_embeddings: false"),
        ("fsdp2", "optimizer_8bit", "can't step what ModelParallelStrategy shards"),
        ("zero_2", "fused_adamw", "chooses the optimizer's kernel"),
    ],
)
def test_techniques_refuse_strategies_with_their_own_rules(strategy, other, message):
    setting = Setting(world_size=2).choose(strategy).choose(other)
    assert any(message in reason for reason in setting.validate(Facts()))


def test_traffic_to_host_and_disk(profile):
    offload = cost(profile, "zero_offload", 2)
    assert offload.micro_batch.host_link_bytes == 2 * 2 * 500  # down, and those of before up
    assert offload.step.host_link_bytes == 2 * 500
    assert offload.overlap
    assert offload.step.host_seconds > 0
    from_disk = cost(profile, "zero_infinity", 1)
    assert from_disk.micro_batch.disk_bytes == 2 * 2 * 1000  # weights for forward and for backward
    assert from_disk.step.disk_bytes == (16 + 16 + 2) * 1000  # states, gradient; weights written
    assert from_disk.step.disk_written_bytes == (16 + 2) * 1000
    assert not from_disk.overlap


def test_full_precision_moves_twice_as_much(profile):
    half, full = (cost(profile, "zero_3", 2, precision) for precision in ("bf16_mixed", "bf16_true"))
    assert half == full  # DeepSpeed's are one
    assert Setting(world_size=2).choose("zero_3").cost(profile).micro_batch.interconnect_bytes == 6000
