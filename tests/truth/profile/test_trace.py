"""Modules that strain tracing: each gets the figure of a real run, or a refusal that says why."""

import collections
import dataclasses
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.truth.profile.modules import trace_step

from .modules import CLASSES, WIDTH, Classifier, batch, peak, really_run, trace_cpu, true_peak

CASES: list = []


def case(make_batch=batch, options=None, assumes=False):
    def register(module):
        CASES.append(pytest.param(module, make_batch, options or StepOptions(), assumes, id=module.__name__))
        return module

    return register


@case(assumes=True)
class ReadsFloatsForLogging(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("item", loss.item())
        self.log("numpy", float(loss.detach().cpu().numpy()))
        self.log("epoch mean", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.history = self.head(batch["x"]).detach().mean(0).tolist()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))


@case()
class UsesTheTrainer(Classifier):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, WIDTH)

    def setup(self, stage):
        self.worlds = nn.Linear(WIDTH, self.trainer.world_size)

    def on_train_batch_start(self, batch, batch_idx):
        self.seen = batch["x"].shape

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("anything", 1, batch_idx)
        self.log("epoch", float(self.current_epoch + self.trainer.num_training_batches))
        assert self.trainer.datamodule is None
        return self.loss(batch) + self.all_gather(self.worlds(batch["x"]).mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = outputs["loss"].detach()


@case(assumes=True)
class BranchesAlike(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert torch.isfinite(loss)
        if torch.isnan(loss).any():
            return None
        return loss * 2 if loss > 0.5 else loss * 3


@case()
class FollowsIds(Classifier):
    """Every branch is the real batch's."""

    def training_step(self, batch, batch_idx):
        loss, y = self.loss(batch), batch["y"]
        if (y == CLASSES - 1).any() and y.float().mean() > 1:
            loss = loss + self.net(batch["x"].repeat(4, 1)).mean()
        hidden = batch["x"]
        for _ in range(int(y.max()) // 4):
            hidden = self.net(hidden)
        longest = int(y.cpu().numpy().max()) + max(y.tolist()) + len(y.unique())
        return loss + hidden[y > 4].mean() + torch.zeros(longest * 100, WIDTH).mean()


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.randn(500, x.size(-1)))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].mean()


class AllocatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.ones(2000, gradient.size(-1)).mean()


@case()
class OwnFunctions(Classifier):
    def training_step(self, batch, batch_idx):
        hidden = AllocatesInBackward.apply(Saves.apply(self.net(batch["x"])))
        return F.cross_entropy(self.head(hidden), batch["y"])


@case()
class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch, batch_idx):
        real, (one, other) = batch["x"], self.optimizers()
        noise, true = torch.randn(len(real), 16), torch.ones(len(real), 1)
        self.toggle_optimizer(one)
        fooled = F.binary_cross_entropy_with_logits(self.critic(self.generator(noise)), true)
        one.zero_grad()
        self.manual_backward(fooled)
        one.step()
        self.untoggle_optimizer(one)
        self.toggle_optimizer(other)
        found = F.binary_cross_entropy_with_logits(self.critic(real), true)
        found = found + F.binary_cross_entropy_with_logits(self.critic(self.generator(noise).detach()), 1 - true)
        other.zero_grad()
        self.manual_backward(found)
        other.step()
        self.untoggle_optimizer(other)
        self.log_dict({"fooled": fooled, "found": found}, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())], []


def ragged():
    lengths = torch.tensor([3, 1, 8, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return {"ids": torch.arange(14), "offsets": offsets, "y": torch.tensor([1, 0, 3, 2])}


@case(ragged)
class Bag(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(100, WIDTH, mode="mean"), nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.embedding(batch["ids"], batch["offsets"])), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@case(options=StepOptions(gradient_clip_val=0.5))
class OverridesSteps(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def validation_step(self, batch, batch_idx):
        self.log("validation loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation loss"}}


@case()
class Reparametrized(Classifier):
    """Weight and spectral norm, an orthogonal layer, tied weights, buffers, a generator of its own."""

    def __init__(self):
        super().__init__()
        p = nn.utils.parametrizations
        self.net = nn.Sequential(
            p.weight_norm(nn.Linear(WIDTH, WIDTH)),
            p.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            p.orthogonal(nn.Linear(WIDTH, WIDTH)),
        )
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.zeros(50, 50))
        self.register_buffer("dropped", torch.zeros(60, 60), persistent=False)
        self.noise = torch.Generator().manual_seed(0)

    def loss(self, batch):
        x = batch["x"] + torch.randn(batch["x"].shape, generator=self.noise)
        return F.cross_entropy(self.head(self.second(self.first(self.net(x)))), batch["y"])


@case()
class PartlyTrained(Classifier):
    """Half-precision parameters, frozen ones, and a part without gradients."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.net(batch["x"])
        found = self.net(self.small(batch["x"].bfloat16()).float())
        return (found - target).square().mean() + self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


@case()
class Checkpointed(Classifier):
    def loss(self, batch):
        x = batch["x"].clone().requires_grad_()
        a = checkpoint(self.net, x, use_reentrant=True)
        return F.cross_entropy(self.head(a + checkpoint(self.net, x, use_reentrant=False)), batch["y"])


@case()
class CompiledAndReading(Classifier):
    """A compiled part runs uncompiled, as a fake has nothing to compile for."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + torch.zeros(len(Path(__file__).read_text()) // 100, WIDTH).mean()


@case(assumes=True)
class Measures(Classifier):
    def __init__(self):
        super().__init__()
        settings = {"task": "multiclass", "num_classes": CLASSES}
        self.scores = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(**settings),
                "f1": torchmetrics.F1Score(**settings, average="macro"),
                "confusion": torchmetrics.ConfusionMatrix(**settings),
            }
        )
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        scores = self.head(self.net(batch["x"]))
        loss = F.cross_entropy(scores, batch["y"])
        self.scores(scores, batch["y"])
        self.mean(loss)
        self.log("mean", self.mean)
        self.log("accuracy", self.scores["accuracy"], on_step=True, on_epoch=True)
        return loss


class Experts(Classifier):
    """A mixture of experts; its `mix` is how they get their tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.mix(batch["x"].repeat(32, 1))), batch["y"].repeat(32))


@case(assumes=True)
class ExpertsByMasks(Experts):
    def mix(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = chosen == number
            if own.any():
                tokens = own.any(-1)
                out[tokens] += expert(x[tokens]) * weights[own][:, None]
        return out


@case()
class ExpertsGrouped(Experts):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def mix(self, x):
        chosen, order = self.router(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x[order], self.weights, offs=ends)


@pytest.mark.nightly_cases("ReadsFloats")
@pytest.mark.parametrize(("module", "make_batch", "options", "assumes"), CASES)
def test_the_figure_is_that_of_a_real_run(module, make_batch, options, assumes):
    torch.manual_seed(0)
    module = module()
    trace = trace_cpu(module, make_batch(), options)
    assert bool(trace.assumptions or trace.taken) is assumes
    assert peak(trace.events) == pytest.approx(peak(really_run(module, make_batch(), options)), rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_double_precision_takes_twice_as_much(device):
    single, double = (
        peak(trace_step(Classifier(), batch(), StepOptions(precision), Emulation(device)).events)
        for precision in ("32-true", "64-true")
    )
    assert double == pytest.approx(2 * single, rel=0.01)


class ReachesItself(Classifier):
    """Reaches its layers through a class attribute."""

    registry: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.registry["last"] = self

    def function(self, x):
        return self.registry["last"].net(x)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.function(batch["x"])), batch["y"])


@pytest.mark.parametrize("run", [trace_cpu, measure_step])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_step_may_reach_the_module_past_self(run, has_gradients):
    module = ReachesItself()
    if has_gradients:
        module.loss(batch()).backward()
    held = [parameter.grad for parameter in module.parameters()]
    plain = run(Classifier(), batch()).events
    assert peak(run(module, batch()).events) == peak(plain)
    assert all(parameter.grad is before for parameter, before in zip(module.parameters(), held, strict=True))


Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a sample"


class Opaque:
    """Nothing that Lightning or a collection walk can look into."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class TakesAny(Classifier):
    def training_step(self, batch, batch_idx):
        if isinstance(batch, (list, tuple)) and not hasattr(batch, "x"):
            batch = Pair(*batch)
        x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
        return self.loss({"x": x, "y": y})


def encoded(x, y):
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


@pytest.mark.parametrize("make", [lambda x, y: (x, y), Pair, Sample, encoded, Opaque])
def test_batches_of_any_class_are_input(make):
    module = TakesAny()
    of_dict = trace_cpu(module, batch())
    assert peak(trace_cpu(module, make(**batch())).events) == peak(of_dict.events)


class WritesIntoItsBatch(Classifier):
    """As layers of graphs do, whose batch is an object with attributes."""

    def training_step(self, batch, batch_idx):
        batch.x = self.net[:2](batch.x)
        batch.x = self.net[2:](batch.x)
        batch.x = self.head(batch.x)
        return F.cross_entropy(batch.x, batch.y)


def test_what_a_step_writes_into_its_batch_is_not_in_the_next_one():
    written = trace_cpu(WritesIntoItsBatch(), Opaque(**batch()))
    assert peak(written.events) == pytest.approx(peak(trace_cpu(Classifier(), batch()).events), rel=0.05)


class GrowsIfSmall(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + self.net(batch["x"]).mean() if loss.item() < 0.01 else loss


class SelectsIfLarge(Classifier):
    """One way of the branch can be traced, the other can't: what it allocates is unknown all the same."""

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        return self.loss(batch) + x[x > 0].mean() if self.head.weight.max().item() > 100 else self.loss(batch)


class SelectsByFloats(Classifier):
    def training_step(self, batch, batch_idx):
        scores = self.head(self.net(batch["x"]))
        wrong = scores.argmax(1) != batch["y"]
        return F.cross_entropy(scores[wrong], batch["y"][wrong])


class RunsUntil(Classifier):
    def training_step(self, batch, batch_idx):
        hidden, turns = self.net(batch["x"]), 0
        while hidden.norm() > 1 and turns < 5:
            hidden, turns = self.net(hidden), turns + 1
        return F.cross_entropy(self.head(hidden), batch["y"])


class NeedsData(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.trainer.datamodule.weight


@pytest.mark.parametrize(
    ("module", "make_batch", "reason"),
    [
        (GrowsIfSmall, batch, "unknown float32 value was read as 1.0"),
        (SelectsIfLarge, batch, "boolean index computed from floating-point tensors"),
        (SelectsByFloats, batch, "boolean index computed from floating-point tensors"),
        (RunsUntil, batch, "only real data can tell"),
    ],
)
def test_what_can_not_be_known_is_refused(module, make_batch, reason):
    with pytest.raises(
        TraceError,
        match=f"training step .*{reason}.*test_trace.py, line.*measure_step|training step.*{reason}.*measure_step",
    ):
        trace_cpu(module(), make_batch())


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        raise KeyError("no such column")


@pytest.mark.parametrize(("module", "words"), [(Fails, "no such column"), (NeedsData, "has no attribute 'weight'")])
def test_an_error_of_the_module_is_told_as_its_own(module, words):
    with pytest.raises(TraceError, match=f"ends in an error of its own.*{words}.*test_trace.py, line.*") as caught:
        trace_cpu(module(), batch())
    assert "measure" not in str(caught.value)


def test_an_error_that_may_come_from_fakes_names_the_line():
    class Shapes(Classifier):
        def training_step(self, batch, batch_idx):
            return self.head(batch["x"][:, :3]).mean()

    with pytest.raises(TraceError, match=r"can't be traced.*test_trace.py, line.*If training gets past this, measure"):
        trace_cpu(Shapes(), batch())


@pytest.mark.nightly
def test_what_a_package_reads_is_not_laid_to_who_asked_for_the_trace(tmp_path):
    """The script or console command that called for a trace is no line of the step."""
    source = """
class FromPackage(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("item", loss.item())
        return loss
"""
    names = {"Classifier": Classifier, "__name__": "package"}
    exec(compile(source, str(tmp_path / "site-packages" / "package.py"), "exec"), names)
    read = [text for text in trace_cpu(names["FromPackage"](), batch()).assumptions if "float32 value" in text]
    assert read == ["an unknown float32 value was read as 1.0"]
    own = next(text for text in trace_cpu(ReadsFloatsForLogging(), batch()).assumptions if "float32 value" in text)
    assert own.endswith(", in `training_step`")


class CountsDistinct(Classifier):
    """Keeps as much as there are different values."""

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        values, _, counts = (hidden.detach() + torch.rand_like(hidden)).unique(return_inverse=True, return_counts=True)
        self.kept = torch.zeros(len(values), 40), torch.zeros(len(counts), 40)
        return F.cross_entropy(self.head(hidden), batch["y"])


class WritesAtTheStart(Classifier):
    def on_train_start(self):
        Path("network.txt").write_text(str(self))


def test_a_hook_at_the_start_that_writes_a_file_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, writing = (peak(trace_cpu(kind(), batch()).events) for kind in (Classifier, WritesAtTheStart))
    assert writing == plain
    assert not list(tmp_path.iterdir())


def test_unknown_values_are_taken_to_differ():
    found = profile_module(CountsDistinct(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    assert peak(found.events) == pytest.approx(true_peak(CountsDistinct, batch, 4), rel=1e-3)
    assert "taken to have 2048 distinct values" in found.assumptions[0]


class RefusesManyValues(Classifier):
    """As metrics do that know the number of classes."""

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        if len((torch.randint(2, hidden.shape) + (hidden > 0)).unique()) > CLASSES:
            raise ValueError("more values than classes")
        return F.cross_entropy(self.head(hidden), batch["y"])


def test_unknown_values_are_taken_to_be_alike_where_many_are_refused():
    found = profile_module(RefusesManyValues(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    assert peak(found.events) == pytest.approx(true_peak(RefusesManyValues, batch, 4), rel=1e-3)
    assert "taken to have 1 distinct value" in found.assumptions[0]


@pytest.mark.parametrize(
    "count",
    [
        lambda x: (x > 0).nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique_consecutive(x),
        lambda x: torch.bincount((x > 0).long().flatten()),
        lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0),
    ],
    ids=["nonzero", "where", "mask", "masked_select", "unique_consecutive", "bincount", "repeat_interleave"],
)
def test_other_sizes_that_depend_on_unknown_values_are_refused(count):
    class Counts(Classifier):
        def training_step(self, batch, batch_idx):
            count(self.net(batch["x"]).detach())
            return self.loss(batch)

    with pytest.raises(TraceError, match="depends on"):
        profile_module(Counts(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)


class Rejects(Classifier):
    """Draws until all samples are accepted, as `torch.distributions.VonMises` does."""

    def accepted(self, x):
        done, kept = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x)
        while not done.all():
            drawn = torch.rand_like(x)
            kept = torch.where(drawn < 0.9, drawn, kept)
            done = done | (drawn < 0.9)
        return kept

    def training_step(self, batch, batch_idx):
        return self.loss({**batch, "x": batch["x"] + self.accepted(batch["x"])})


class RejectsNumbers(Rejects):
    """The loop makes numbers only, so that the memory doesn't depend on its turns."""

    def accepted(self, x):
        drawn = torch.ones(())
        while drawn.item() > 0.5:
            drawn = torch.rand(())
        return drawn


@pytest.mark.nightly
def test_a_loop_that_draws_until_a_number_fits_is_traced():
    found = trace_step(RejectsNumbers(), batch(), StepOptions(), Emulation("cpu"))
    assert found.events.live_bytes().max() == pytest.approx(true_peak(RejectsNumbers, batch, 3), rel=1e-3)


@pytest.mark.nightly
def test_a_loop_that_goes_on_while_it_reads_the_same_is_refused_with_its_line():
    with pytest.raises(TraceError, match=r"a loop goes on for ever while.*test_trace\.py"):
        trace_step(Rejects(), batch(), StepOptions(), Emulation("cpu"))
