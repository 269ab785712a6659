from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from lightning_memfit.data import ImageData, RandomTensors
from lightning_memfit.models import ImageClassifier
from tests.helpers.trainers import quiet_trainer

VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
VIT |= {"intermediate_size": 32, "patch_size": 8}
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "image_size": 32}
IMAGES = {"pixel_values": {"shape": [3, 16, 16]}, "labels": {"shape": [], "below": 3}}


def test_learns_images_by_heart_and_logs_accuracy():
    torch.manual_seed(0)
    module = ImageClassifier(3, config=VIT, learning_rate=1e-2, weight_decay=0.0)
    trainer = quiet_trainer(max_epochs=25)
    trainer.fit(module, datamodule=RandomTensors(IMAGES, num_samples=8, batch_size=4))
    assert trainer.callback_metrics["train_loss"] < 0.5  # log(3) = 1.1
    assert 0 <= trainer.callback_metrics["val_accuracy"] <= 1
    assert trainer.callback_metrics["val_loss"] > 0


@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=lambda config: config["model_type"])
def test_a_pretrained_head_gives_way_to_the_own_classes(tmp_path, config):
    first = ImageClassifier(5, config=config)
    first.configure_model()
    first.export(tmp_path / "out")
    module = ImageClassifier(3, pretrained=str(tmp_path / "out"))
    module.configure_model()
    side = config["image_size"]
    assert module(torch.zeros(2, 3, side, side)).logits.shape == (2, 3)
    old, new = first.model.state_dict(), module.model.state_dict()
    same = [name for name in old if old[name].shape == new[name].shape and "classifier" not in name]
    assert len(same) == len(old) - 2
    assert all(torch.equal(old[name], new[name]) for name in same)


def test_other_weights_than_the_head_keep_their_shapes(tmp_path):
    """Position embeddings of another number of patches began at random, and training went on."""
    first = ImageClassifier(5, config=VIT)
    first.configure_model()
    first.export(tmp_path / "out")
    module = ImageClassifier(3, pretrained=str(tmp_path / "out"), config={"image_size": 32})
    with pytest.raises(ValueError, match=r"position_embeddings has the shape \[1, 5, 16\] in .* have \[1, 17, 16\]"):
        module.configure_model()


def test_classes_have_their_names_in_what_is_exported(tmp_path):
    for name in ("bee", "ant"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (8, 8), (number, 0, 0))
            image.save(tmp_path / "images" / name / f"{number}.png")
    first = ImageClassifier(2, config=VIT)
    first.configure_model()
    first.export(tmp_path / "pretrained")  # with as many classes of other names
    data = ImageData(str(tmp_path / "images"), image_size=16, batch_size=2, val_fraction=0.4, num_workers=0)
    data.setup("fit")
    module = ImageClassifier(2, pretrained=str(tmp_path / "pretrained"))
    module._trainer = SimpleNamespace(datamodule=data)
    module.setup("fit")
    module.configure_model()
    exported = AutoConfig.from_pretrained(module.export(tmp_path / "out"))
    assert exported.id2label == {0: "ant", 1: "bee"}
    assert exported.label2id == {"ant": 0, "bee": 1}


def test_data_that_do_not_fit_are_refused():
    class Data(ImageData):
        def prepare_data(self):
            pass

        def make_samples(self):
            self.num_classes = 4
            return [], []

    def run(module, size):
        quiet_trainer().fit(module, datamodule=Data("images", image_size=size))

    with pytest.raises(ValueError, match="`num_labels=3`, but the data have 4 classes"):
        run(ImageClassifier(3, config=VIT), 16)
    with pytest.raises(ValueError, match="`image_size=32`, but the model's images have 16 pixels"):
        run(ImageClassifier(4, config=VIT), 32)


def test_what_classifies_no_images_is_refused():
    with pytest.raises(ValueError, match="can't train a 'gpt2' model"):
        ImageClassifier(3, config={"model_type": "gpt2"}).configure_model()
    with pytest.raises(ValueError, match="`num_labels=1` must be at least 2"):
        ImageClassifier(1, config=VIT)
