"""Every ZeRO stage and CPU offload, with real DeepSpeed over gloo, trains as plain torch AdamW does.

Tolerances are absolute, on losses of about 4.5 over four optimizer steps. In fp32 the stages differ from torch only in
the order of additions (1e-6); in bf16 all keep fp32 master weights, and a weight may be rounded the other way (2e-4).
"""

import pytest

from tests.helpers.strategy_launch import launch
from tests.helpers.strategy_runs import CLIP, CONFIG

pytest.importorskip("deepspeed")

TOLERANCE = {"32-true": 1e-6, "bf16-mixed": 2e-4, "bf16-true": 2e-4}


def zero(**options):
    return {"class_path": "lightning_memfit.strategies.ZeroStrategy", "init_args": options}


def cases(**common):
    strategies = {
        "stage_1": "memfit_zero_1",
        "stage_2": "memfit_zero_2",
        "stage_3": "memfit_zero_3",
        "offload": "memfit_zero_offload",
        "stage_3_offload": zero(stage=3, offload_optimizer=True, offload_parameters=True),
        "small_pieces": zero(stage=3, sub_group_size=5000, bucket_size=5000),
    }
    made = {}
    for name, strategy in strategies.items():
        made[name] = {"strategy": strategy, "accumulate": 2, "clip": CLIP} | common
        made[f"{name}_bf16"] = {"strategy": strategy, "precision": "bf16-mixed"} | common
    made["stage_2_bf16_true"] = {"strategy": "memfit_zero_2", "precision": "bf16-true"} | common
    return made


CASES = {ranks: cases(devices=ranks) for ranks in (1, 2)}

SHORT_WINDOWS = {
    name: {
        "strategy": strategy,
        "devices": 2,
        "accumulate": 3,
        "batches": 10,
        "clip": CLIP,
        "scenario": "tests.helpers.strategy_scenarios.epochs",
    }
    for name, strategy in {
        "ddp": "memfit_ddp",
        "stage_1": "memfit_zero_1",
        "stage_2": "memfit_zero_2",
        "stage_3": "memfit_zero_3",
        "offload": "memfit_zero_offload",
        "stage_3_offload": zero(stage=3, offload_optimizer=True, offload_parameters=True),
    }.items()
}

WRONG_ARGUMENTS = {
    "float16": ({"strategy": "memfit_zero_2", "precision": "16-mixed"}, "no float16 on the CPU"),
    "clipping": (
        {"strategy": zero(stage=2, config={"gradient_clipping": 1.0}), "clip": CLIP},
        "`config.gradient_clipping=1.0` contradicts `trainer.gradient_clip_val`",
    ),
    "precision": (
        {"strategy": zero(stage=2, config={"bf16": {"enabled": True}})},
        "`config.bf16.enabled=True` contradicts `trainer.precision`",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    made = {}

    def of(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"zero-{ranks}")
            made[ranks] = launch(folder, CASES[ranks] | (special_cases(folder) if ranks == 1 else {}))
        return made[ranks]

    return of


def special_cases(folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {key: value for key, value in CONFIG.items() if key != "model_type"}
    GPT2LMHeadModel(GPT2Config(**options)).save_pretrained(folder / "pretrained")
    module = {"pretrained": str(folder / "pretrained"), "config": None}
    refused = {name: case | {"expect_error": True} for name, (case, _) in WRONG_ARGUMENTS.items()}
    return refused | {"pretrained": {"strategy": "memfit_zero_3", "module": module}}


@pytest.mark.nightly_cases("stage_1-2")
@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.parametrize("name", CASES[1])
def test_losses_are_those_of_plain_torch(results, ranks, name):
    result = results(ranks)[name]
    tolerance = TOLERANCE[CASES[ranks][name].get("precision", "32-true")]
    assert len(result["losses"]) == 4 * CASES[ranks][name].get("accumulate", 1)
    assert result["losses"] == pytest.approx(result["plain"], abs=tolerance, rel=0)
    assert result["losses"][-1] < result["losses"][0] - 0.3


def test_pretrained_weights_are_loaded_into_partitions(results):
    result = results(1)["pretrained"]
    assert result["losses"] == pytest.approx(result["plain"], abs=1e-6, rel=0)


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_what_the_trainer_decides_is_not_decided_twice(results, name):
    assert WRONG_ARGUMENTS[name][1] in results(1)[name]["error"]


@pytest.fixture(scope="module")
def short_windows(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("windows"), SHORT_WINDOWS)


@pytest.mark.parametrize("name", [name for name in SHORT_WINDOWS if name != "ddp"])
def test_a_window_ends_with_its_epoch(short_windows, name):
    expected = short_windows["ddp"]
    assert expected["steps"] == 8
    assert short_windows[name]["steps"] == 8
    assert short_windows[name]["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
