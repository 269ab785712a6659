import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.checkpointing.blocks import find_blocks, select_blocks
from tests.contract.checkpointing.models import MODELS, ResNet

EXPECTED = {
    "gpt2": [("transformer.h", "GPT2Block", 4)],
    "llama": [("model.layers", "LlamaDecoderLayer", 3)],
    "bert": [("bert.encoder.layer", "BertLayer", 3)],
    "t5": [("encoder.block", "T5Block", 2), ("decoder.block", "T5Block", 3)],
    "resnet": [("layer1", "Bottleneck", 3), ("layer2", "Bottleneck", 5)],
}


def summary(groups):
    return [(group.container, group.class_name, len(group.modules)) for group in groups]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Block() for _ in range(4))


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))


class Other(Block):
    pass


@pytest.mark.parametrize("name", EXPECTED)
def test_known_models(name):
    assert summary(find_blocks(MODELS[name][0]())) == EXPECTED[name]


def test_vit_whatever_its_container_is_called():
    (group,) = find_blocks(MODELS["vit"][0]())
    assert (group.class_name, len(group.modules)) == ("ViTLayer", 3)


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode])
def test_no_values_are_read(mode):
    with mode():
        model = ResNet()
    assert summary(find_blocks(model)) == EXPECTED["resnet"]


def test_layers_of_experts_are_blocks_and_not_the_experts():
    model = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(3))})
    assert summary(find_blocks(model)) == [("layers", "Experts", 3)]


def test_stages_that_differ_are_opened():
    model = nn.ModuleDict({"stages": nn.ModuleList([Stage(8), Stage(16)])})
    assert summary(find_blocks(model)) == [("stages.0.blocks", "Block", 2), ("stages.1.blocks", "Block", 2)]


def test_layers_of_two_kinds_make_two_groups():
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Other(), Block(), Other(), Block()])})
    groups = find_blocks(model)
    assert summary(groups) == [("layers", "Block", 3), ("layers", "Other", 2)]
    assert groups[1].names == ("layers.1", "layers.3")


def test_small_classes_and_leaves_are_left_out():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(Block(64) for _ in range(3)),
            "heads": nn.ModuleList([Other(4), Other(4)]),
            "mlp": nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500)),
        }
    )
    assert summary(find_blocks(model)) == [("layers", "Block", 3)]


def test_named_blocks():
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Other()]), "one": Block()})
    assert summary(select_blocks(model, "layers")) == [("layers", "Block", 2)]
    assert [group.names for group in select_blocks(model, "Block")] == [("layers.0", "one")]
    assert [group.names for group in select_blocks(model, ["one", "layers.1"])] == [("one",), ("layers.1",)]


def test_wrong_names():
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Other()])})
    with pytest.raises(ValueError, match=r"blocks='layer'.*layers"):
        select_blocks(model, "layer")
    with pytest.raises(ValueError, match="inside it"):
        select_blocks(model, ["layers.0", "layers.0.layers.1"])
    with pytest.raises(ValueError, match="inside it"):
        select_blocks(model, ["layers.0", "layers.0"])
    with pytest.raises(ValueError, match="name nothing"):
        select_blocks(model, [])
