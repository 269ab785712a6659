import shutil

import pytest
import torch

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.torch_compile import TorchCompile
from tests.contract.cases import module
from tests.contract.runs import fit, loader

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


@pytest.fixture(scope="module")
def plain():
    return fit(module=module)


@pytest.mark.nightly_cases("full", "selective")
@pytest.mark.parametrize(
    "checkpointing", [{}, {"mode": "selective", "keep": ["matmul", "attention"]}], ids=["full", "selective"]
)
def test_compiled_blocks_that_are_checkpointed(plain, checkpointing):
    ours = fit([ActivationCheckpointing(**checkpointing), TorchCompile()], module)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=1e-5, atol=0)


def test_blocks_are_compiled_while_it_trains_and_plain_afterwards(plain):
    seen = []

    class Watched(type(module())):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append([block._compiled_call_impl is not None for block in self.model.transformer.h])

    def watched():
        model = module()
        model.__class__ = Watched
        return model

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = fit([TorchCompile(blocks=["model.transformer.h.1", "model.transformer.h.2"])], watched)
    assert seen == [[False, True, True, False]] * 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # equal blocks share one compilation
    assert not any("_compiled_call_impl" in vars(child) for child in ours.modules())
    assert ours.state_dict().keys() == plain.state_dict().keys()


def test_the_estimate_is_an_upper_bound():
    """Compiled code allocates past dispatch modes, so the allocator's own events are counted."""
    batch = next(iter(loader()))
    peak = 0

    class Measured(type(module())):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.profiler = torch.profiler.profile(profile_memory=True)
                self.profiler.__enter__()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 3:
                self.profiler.__exit__(None, None, None)

    def measured():
        model = module()
        model.__class__ = Measured
        return model

    ran = fit([TorchCompile()], measured)
    live = 0
    for event in ran.profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    traced = profile_module(module(), batch, emulation=Emulation(device="cpu"), any_micro_batch=False)
    events = traced.events
    steady = [at for at, name in events.phases if name == "forward"][1]
    lasting = int(events.live_bytes()[steady - 1])
    assert 0 < peak <= 1.03 * (predict_peak_bytes(traced, 2) - lasting)
