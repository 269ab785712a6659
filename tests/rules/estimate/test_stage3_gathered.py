"""Weights that stage 3 has gathered: as DeepSpeed's own coordinator says of the same order of modules."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.estimate import deepspeed, stage3_gathered
from lightning_memfit.estimate.division import Division, estimate_rank
from lightning_memfit.estimate.stage3_gathered import GatherSizes, Use, gathered_elements, left_gathered, uses_of
from lightning_memfit.estimate.steady_state import second_step
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import Emulation

WIDTH, HIDDEN, ROWS = 8, 32, 256
WEIGHT = WIDTH * HIDDEN


class Stack(pl.LightningModule):
    """Four times a wide and a narrow layer, which the training step calls one way or the other."""

    def __init__(self, calls_itself: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.calls_itself = calls_itself
        layers = [torch.nn.Linear(*sizes) for _ in range(4) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        self.model = torch.nn.Sequential(*layers)
        for layer in layers[2:4] if frozen else ():
            layer.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(batch)
        return found

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self(batch) if self.calls_itself else self.model(batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameter for parameter in self.parameters() if parameter.requires_grad)


def profile_of(**options: bool) -> ModelProfile:
    return profile_module(Stack(**options), torch.rand(ROWS, WIDTH), emulation=Emulation("cpu"), any_micro_batch=False)


def uses(*names: str) -> list[Use]:
    """Uses of weights such as `x3`, a name and its elements."""
    return [Use(at, ((name, int(name[1:])),)) for at, name in enumerate(names)]


def names_of(found: list[Use]) -> list[str]:
    weights: list[Any] = [weight for use in found for weight, _ in use.weights]
    return [name for name, _ in weights]


def test_a_step_is_told_by_its_modules_and_gradients() -> None:
    profile = profile_of()
    spans = second_step(profile.events)
    found = uses_of(profile, spans["forward"][0], *spans["backward"], persistent=HIDDEN)
    forward = [f"model.{number}.weight" for number in range(8)]
    assert names_of(found) == [*forward, *reversed(forward)]


def test_frozen_weights_are_used_where_their_place_says() -> None:
    profile = profile_of(frozen=True)
    spans = second_step(profile.events)
    found = uses_of(profile, spans["forward"][0], *spans["backward"], persistent=HIDDEN)
    forward = [f"model.{number}.weight" for number in range(8)]
    assert names_of(found) == [*forward, *reversed(forward)]


@pytest.mark.parametrize("calls_itself", [False, True])
def test_a_profile_knows_whether_the_step_calls_its_module(calls_itself: bool) -> None:
    assert profile_of(calls_itself=calls_itself).calls_itself is calls_itself


def test_nothing_ahead_means_the_weight_in_use() -> None:
    order = uses("a5", "b3", "c7", "c7", "b3", "a5")
    assert gathered_elements(order, GatherSizes()) == [5, 3, 7, 7, 3, 5]


def test_a_buffer_for_several_weights_stays_until_all_were_copied_and_used() -> None:
    order = uses("a2", "b3", "c4", "d5")
    found = gathered_elements(order, GatherSizes(prefetch=5, live=9, reuse=0))
    assert found == [5 + 4 + 5, 3 + 4 + 5, 4 + 5, 5]


def test_weights_that_are_needed_again_soon_stay() -> None:
    order = uses("a2", "b3", "b3", "a2")
    for reuse, kept in ((3, [2, 3, 3, 2]), (100, [2, 5, 5, 2])):
        found = gathered_elements(order, GatherSizes(prefetch=0, live=0, reuse=reuse))
        assert found == kept


def test_a_module_whose_weights_stay_whole_lets_go_of_those_before_it() -> None:
    profile = profile_of()
    first, middle, stop = (*second_step(profile.events)["forward"][:1], *second_step(profile.events)["backward"])
    assert not any(use.weights for use in uses_of(profile, first, middle, stop, persistent=WEIGHT))
    assert left_gathered(profile, HIDDEN) == WEIGHT  # of the first layer, which reads the batch
    assert left_gathered(profile, WEIGHT) == 0


def test_the_weights_of_a_last_module_that_stay_whole_are_not_gathered_when_backward_ends() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, HIDDEN))
    wrapped = Stack()
    wrapped.model = module
    profile = profile_module(wrapped, torch.rand(ROWS, WIDTH), emulation=Emulation("cpu"), any_micro_batch=False)
    assert left_gathered(profile, WIDTH * WIDTH) == 0


def test_a_step_that_calls_its_module_gathers_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's record of the order begins anew with each call, so that it never has a whole one."""
    monkeypatch.setattr(deepspeed, "PERSISTENT_NUMEL", HIDDEN)  # or all weights of a small model stay gathered
    ahead = {"stage3_prefetch_bucket_size": 300, "stage3_max_live_parameters": 600, "stage3_max_reuse_distance": 600}
    divided = Division("zero_3", 3, 2, 2, deepspeed=True, sizes=ahead)
    profile, other = profile_of(), profile_of(calls_itself=True)
    assert (divided.run_of(profile).gathered, divided.run_of(other).gathered) == (5 * WEIGHT, 0)
    more = estimate_rank(profile, divided).allocated_bytes - estimate_rank(other, divided).allocated_bytes
    assert more == 4 * (3 * WEIGHT - WEIGHT)  # where backward begins


# --- DeepSpeed's own coordinator --------------------------------------------------------------------------------------


def test_more_than_one_weight_is_gathered_as_by_deepspeeds_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights after every fetch of a third pass, for blocks of several widths and sizes of all orders."""
    blocks = [uses("q4", "k3", "v3", "o4", "u16", "d15"), uses("e40", "q4", "u9"), uses("a7", "b7", "c7", "d7", "e7")]
    limits = [(8, 30, 30), (1, 5, 0), (20, 20, 100), (50, 90, 10), (13, 60, 45), (10**6, 10**6, 10**6)]
    for block in blocks:
        for depth in (1, 3, 5):
            names = [(f"{layer}.{w}", numel) for layer in range(depth) for use in block for w, numel in use.weights]
            order = [Use(at, (weight,)) for at, weight in enumerate([*names, *reversed(names)])]
            for prefetch, live, reuse in limits:
                sizes = GatherSizes(prefetch, live, reuse)
                assert without_buffers(order, sizes) == by_coordinator(order, sizes, monkeypatch)


def without_buffers(order: list[Use], sizes: GatherSizes) -> list[int]:
    """What is gathered, without the buffers of collectives, which the coordinator doesn't count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage3_gathered._Gathering, "_copy_out", lambda *_: 0)
        return gathered_elements(order, sizes)


def by_coordinator(order: list[Use], sizes: GatherSizes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the coordinator see an order twice, then read what it has gathered after every fetch."""
    library = pytest.importorskip("deepspeed.runtime.zero.partitioned_param_coordinator")
    for name in ("assert_ints_same_as_other_ranks", "print_rank_0", "debug_param2name_id_shape"):  # of other ranks
        monkeypatch.setattr(library, name, lambda *_, **__: None)
    distinct = dict.fromkeys(use.weights[0] for use in order)
    weights = {weight: library_weight(number, *weight) for number, weight in enumerate(distinct)}
    modules = {weight: library_module(number, found) for number, (weight, found) in enumerate(weights.items())}
    coordinator = library.PartitionedParameterCoordinator(
        sizes.prefetch, sizes.reuse, sizes.live, None, library.InflightParamRegistry()
    )
    bare = [library_module(1000 + number) for number in range(len(order) + 1)]
    found: list[int] = []

    def run(module: Any, forward: bool) -> None:
        coordinator.trace_prologue(module)
        if coordinator.is_record_trace():
            coordinator.record_module(module)
        coordinator.fetch_sub_module(module, forward)

    for _ in range(3):
        coordinator.reset_step()
        found = []
        run(bare[-1], True)  # the root
        for step, use in enumerate(order):
            forward, module = step < len(order) // 2, modules[use.weights[0]]
            run(module, forward)
            gathered = [w for w in weights.values() if w.ds_status != library.ZeroParamStatus.NOT_AVAILABLE]
            found.append(sum(w.ds_numel for w in gathered))
            coordinator.release_sub_module(module, forward)
            run(bare[step], forward)
            coordinator.release_sub_module(bare[step], forward)
    assert coordinator.is_complete_trace()
    return found


def library_weight(number: int, name: str, numel: int) -> Any:
    """A weight with what the coordinator asks of it."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    weight: Any = torch.nn.Parameter(torch.empty(0))
    weight.ds_id, weight.ds_numel, weight.ds_shape = number, numel, (numel,)
    weight.ds_persist, weight.is_external_param = False, False
    weight.ds_status, weight.ds_active_sub_modules = ZeroParamStatus.NOT_AVAILABLE, set()
    weight.ds_tensor, weight.ds_secondary_tensor, weight.nvme_swapper = SimpleNamespace(final_location=None), None, None
    weight.partition_numel = lambda: numel
    weight.ds_summary = lambda **_: name

    def gather(group: list[Any], quantize: bool) -> Any:
        for one in group:
            one.ds_status = ZeroParamStatus.INFLIGHT

        def wait(handle_dependency: bool = True) -> None:
            for one in group:
                if one.ds_status == ZeroParamStatus.INFLIGHT:  # else it was waited for before
                    one.ds_status = ZeroParamStatus.AVAILABLE

        return SimpleNamespace(wait=wait)

    def partition(free_data: bool = True) -> None:
        weight.ds_status = ZeroParamStatus.NOT_AVAILABLE

    weight.all_gather_coalesced, weight.partition = gather, partition
    return weight


def library_module(number: int, weight: Any = None) -> Any:
    """A module with what the coordinator asks of it."""
    module: Any = torch.nn.Module()
    if weight is not None:
        module.weight = weight
    module.ds_id, module.ds_recompute_parameters, module.ds_external_parameters = number, set(), tuple
    return module
