import pytest
import torch

from lightning_memfit.data import ImageData, RandomTensors
from lightning_memfit.models import DiffusionUNet
from tests.helpers.trainers import quiet_trainer

pytest.importorskip("diffusers")

TINY = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 4, "block_out_channels": [8, 8]}
TINY |= {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
IMAGES = {"pixel_values": {"shape": [3, 8, 8]}, "labels": {"shape": [], "below": 2}}


def built(**arguments):
    torch.manual_seed(0)
    module = DiffusionUNet(config=arguments.pop("config", TINY), **arguments)
    module.configure_model()
    return module


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_loss_is_that_of_the_noise_in_a_noisy_image(prediction):
    """By the closed form of Ho et al. 2020, equation 4; v as in Salimans and Ho 2022, appendix D."""
    module = built(prediction_type=prediction, beta_schedule="linear")
    images = torch.rand(3, 3, 8, 8)
    torch.manual_seed(5)
    loss = module._loss({"pixel_values": images})
    torch.manual_seed(5)
    noise = torch.randn(3, 3, 8, 8)
    steps = torch.randint(1000, (3,))
    kept = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)[steps].view(3, 1, 1, 1)
    noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
    target = noise if prediction == "epsilon" else kept.sqrt() * noise - (1 - kept).sqrt() * images
    expected = (module.model(noisy, steps).sample - target).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_classes_condition_a_network_that_has_them():
    batch = {"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    module = built(config={**TINY, "num_class_embeds": 2})
    losses = []
    for labels in (batch["labels"], 1 - batch["labels"]):
        torch.manual_seed(5)
        losses.append(module._loss({**batch, "labels": labels}).item())
    assert losses[0] != losses[1]


def test_validation_draws_the_same_noise_and_leaves_the_runs_alone():
    module = built()
    trainer, data = quiet_trainer(), RandomTensors(IMAGES, num_samples=8, batch_size=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    losses = [float(trainer.validate(module, data, verbose=False)[0]["val_loss"]) for _ in range(2)]
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.medium
def test_an_export_is_a_pipeline_that_is_trained_on(tmp_path):
    module = built()
    module.export(tmp_path / "out")
    again = DiffusionUNet(pretrained=str(tmp_path / "out"))
    again.configure_model()
    ours, theirs = module.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Give `pretrained`, or `config`"):
        DiffusionUNet()
    with pytest.raises(ValueError, match="diffusers can't build this UNet2DModel"):
        DiffusionUNet(config={"down_block_types": ["NoBlock"]}).configure_model()
    with pytest.raises(ValueError, match="is neither a folder with a UNet"):
        DiffusionUNet(pretrained=str(tmp_path)).configure_model()

    class Data(ImageData):
        def prepare_data(self):
            pass

        def make_samples(self):
            return [], []

    with pytest.raises(ValueError, match="`image_size=9` can't be halved 1 times"):
        quiet_trainer().fit(DiffusionUNet(config=TINY), datamodule=Data("images", image_size=9))
