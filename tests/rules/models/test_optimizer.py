import pytest
import torch
from torch import nn

from lightning_memfit.models.optimizer import cosine_with_warmup, weight_decay_groups


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, size))  # two-dimensional: the class decides, not the shape


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), RMSNorm(4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.expert_bias = nn.Parameter(torch.ones(2, 4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def by_decay(module, weight_decay=0.1):
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        group["weight_decay"]: sorted(names[id(p)] for p in group["params"])
        for group in weight_decay_groups(module, weight_decay)
    }


def test_only_matrices_and_embeddings_decay():
    groups = by_decay(Model())
    assert groups[0.1] == ["embedding.weight", "linear.weight"]
    assert "norms.3.weight" in groups[0.0]
    assert "expert_bias" in groups[0.0]
    assert "scale" in groups[0.0]


def test_what_zero_3_has_partitioned_decays_by_its_full_shape():
    module = nn.Linear(4, 2)
    for parameter in module.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    decayed, undecayed = weight_decay_groups(module, 0.1)
    assert decayed["params"] == [module.weight]
    assert undecayed["params"] == [module.bias]


def test_every_trainable_parameter_once():
    model = Model()
    model.linear.weight.requires_grad_(False)
    listed = [id(p) for group in weight_decay_groups(model, 0.1) for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def factor(step, warmup_steps=4, total_steps=12, floor=0.1):
    return cosine_with_warmup(step, warmup_steps=warmup_steps, total_steps=total_steps, floor=floor)


def test_rises_linearly_then_falls_to_the_floor():
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == factor(100) == pytest.approx(0.1)
