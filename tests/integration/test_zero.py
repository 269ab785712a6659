"""Every ZeRO stage and CPU offload, with real DeepSpeed over gloo, trains as plain torch AdamW does.

Tolerances are absolute, on losses of about 4.5 over four optimizer steps. In fp32 the stages differ from torch only in
the order of additions (1e-6); in bf16 all keep fp32 master weights, and a weight may be rounded the other way (2e-4).
"""

import pytest

from tests.helpers.strategy_launch import launch

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

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
        made[name] = {"strategy": strategy, "accumulate": 2, "clip": 0.5} | common
        made[f"{name}_bf16"] = {"strategy": strategy, "precision": "bf16-mixed"} | common
    made["stage_2_bf16_true"] = {"strategy": "memfit_zero_2", "precision": "bf16-true"} | common
    return made


CASES = {ranks: cases(devices=ranks) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    made = {}

    def of(ranks):
        if ranks not in made:
            made[ranks] = launch(tmp_path_factory.mktemp(f"zero-{ranks}"), CASES[ranks])
        return made[ranks]

    return of


@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.parametrize("name", CASES[1])
def test_losses_are_those_of_plain_torch(results, ranks, name):
    result = results(ranks)[name]
    tolerance = TOLERANCE[CASES[ranks][name].get("precision", "32-true")]
    assert len(result["losses"]) == 4 * CASES[ranks][name].get("accumulate", 1)
    assert result["losses"] == pytest.approx(result["plain"], abs=tolerance, rel=0)
    assert result["losses"][-1] < result["losses"][0] - 0.3
