from argparse import Namespace
from typing import Any

import pytest
from jsonargparse import Namespace as Parsed

from cli import fit, plan_recipe
from cli.fit import PLAN_VARIABLE, is_started_by_others, num_devices, plan_file

FITTING = {
    "fits": True,
    "summary": "Fits: zero_2 on 2 devices",
    "numbers": "precision 32-true",
    "notes": ["For as many samples in batches of another size: ..."],
    "overlay": {"trainer": {"strategy": "memfit_zero_2"}},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*fit._STARTED_BY_OTHERS, "SLURM_NTASKS", PLAN_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def trainer(devices: Any, num_nodes: int = 1, accelerator: str = "cpu") -> Namespace:
    return Namespace(devices=devices, num_nodes=num_nodes, accelerator=accelerator)


@pytest.mark.parametrize(
    ("devices", "expected"), [(2, 2), ("2", 2), ("auto", 1), (-1, 1), ([0, 3], 2), ("0,3", 2), ("1,", 1), (1, 1)]
)
def test_devices_are_counted_as_lightning_does(devices: Any, expected: int) -> None:
    assert num_devices(trainer(devices)) == expected
    assert num_devices(trainer(devices, num_nodes=3)) == 3 * expected


def test_the_plan_is_made_once_and_found_by_processes_that_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def plan(request: plan_recipe.PlanRequest, compare: bool) -> tuple[dict[str, Any], None]:
        asked.append(request.recipe)
        return FITTING, None

    monkeypatch.setattr(plan_recipe, "plan_recipe", plan)
    given = ["--config", "mine.yaml", "--memfit", "auto", "--ckpt_path=last", "--trainer.devices", "2", "--memfit=auto"]
    path = plan_file(given)
    assert asked == [("--config", "mine.yaml", "--trainer.devices", "2")]
    assert "memfit_zero_2" in path.read_text()
    assert plan_file(given) == path
    assert len(asked) == 1
    said = capsys.readouterr().err
    assert all(f"memfit: auto: {words}\n" in said for words in (FITTING["summary"], *FITTING["notes"]))  # type: ignore[misc]


def test_what_fits_nowhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"fits": False, "summary": "Nothing fits.", "advice": ["least", "A larger card would do."]}
    monkeypatch.setattr(plan_recipe, "plan_recipe", lambda *_, **__: (refused, None))
    with pytest.raises(ValueError, match=r"Nothing fits\. A larger card would do\."):
        plan_file([])


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_NTASKS"])
def test_processes_that_others_start_are_told_by_the_first_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_started_by_others(1)
    monkeypatch.setenv(name, "1")
    assert is_started_by_others(1)
    monkeypatch.setenv(PLAN_VARIABLE, "plan.yaml")  # the process that started this one has planned
    assert not is_started_by_others(1)


def test_processes_on_several_machines_are_started_by_others() -> None:
    assert is_started_by_others(2)


@pytest.mark.parametrize("allow", [None, ["exact", "lora"]])
def test_adapters_of_a_recipe_are_not_left_out_in_silence(allow: list[str] | None) -> None:
    lora = Namespace(class_path="lightning_memfit.techniques.lora.Lora", init_args=Namespace())
    own = Namespace(class_path="lightning_memfit.fitting.auto.MemFit", init_args=Namespace(allow=allow))
    trainer = Namespace(callbacks=[lora, own])
    if allow is None:
        with pytest.raises(ValueError, match="has Lora, by which adapters are trained"):
            fit.plan_automatically(trainer)
        return
    fit.plan_automatically(trainer)
    assert trainer.callbacks == [own]


@pytest.mark.parametrize(
    ("arguments", "batch_size", "lost"),
    [
        ({"global_batch_size": 64}, 8, "global_batch_size=64"),
        ({"global_batch_size": 64}, None, "global_batch_size=64"),
        ({"global_batch_size": 64}, 32, ""),  # which two accumulated batches are
        ({"loss_weight": "mine.tokens"}, 8, "loss_weight=mine.tokens"),
        ({"allow_batch_statistics": True}, 8, "allow_batch_statistics=True"),
        ({"micro_batch_size": 2, "last_resort": "recompute", "loss_weight": None}, 8, ""),
    ],
)
def test_a_plan_does_not_replace_micro_batching_by_one_that_trains_by_other_numbers(
    arguments: dict[str, Any], batch_size: int | None, lost: str
) -> None:
    path = "lightning_memfit.fitting.step.callback.MicroBatching"
    batching = Parsed(class_path=path, init_args=Parsed(**arguments))
    options = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "accumulate_grad_batches": 2}
    trainer = Namespace(callbacks=[batching], **options)
    if lost:
        with pytest.raises(ValueError, match=f"`memfit: auto` would replace MicroBatching by one without its `{lost}`"):
            fit.plan_automatically(trainer, batch_size)
        return
    fit.plan_automatically(trainer, batch_size)
    assert [spec.class_path for spec in trainer.callbacks] == ["lightning_memfit.fitting.auto.MemFit"]
