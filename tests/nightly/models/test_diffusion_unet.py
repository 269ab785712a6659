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


def test_an_export_is_a_pipeline_that_is_trained_on(tmp_path):
    module = built()
    module.export(tmp_path / "out")
    again = DiffusionUNet(pretrained=str(tmp_path / "out"))
    again.configure_model()
    ours, theirs = module.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def pipeline(folder, scheduler):
    """A folder of a pipeline with a tiny UNet, without asking the module."""
    from diffusers import UNet2DModel

    UNet2DModel(**TINY).save_pretrained(folder / "unet")
    scheduler.save_pretrained(folder / "scheduler")
    return str(folder)


V_PREDICTION = {"num_train_timesteps": 50, "beta_schedule": "linear", "prediction_type": "v_prediction"}


def test_a_pretrained_pipeline_brings_its_noise_schedule_and_keeps_it(tmp_path):
    """The default schedule would train it on another target, and write another scheduler beside it."""
    from diffusers import DDIMScheduler, DDPMScheduler

    before = DDIMScheduler(**V_PREDICTION, beta_end=0.03, clip_sample_range=2.0, timestep_spacing="trailing")
    module = DiffusionUNet(pretrained=pipeline(tmp_path / "in", before), prediction_type="v_prediction")
    assert torch.equal(module.noise_schedule.betas, before.betas)
    module.configure_model()
    module._loss({"pixel_values": torch.rand(8, 3, 8, 8)})
    written = DDPMScheduler.from_pretrained(module.export(tmp_path / "out"), subfolder="scheduler").config
    for name in (*V_PREDICTION, "beta_end", "clip_sample_range", "timestep_spacing"):
        assert written[name] == before.config[name]


def test_a_noise_schedule_that_contradicts_the_pretrained_one_is_refused(tmp_path):
    from diffusers import DDPMScheduler, ScoreSdeVeScheduler

    name = pipeline(tmp_path / "in", DDPMScheduler(**V_PREDICTION))
    with pytest.raises(ValueError, match=r"`train_timesteps=1000`, but the scheduler of .* has 50\. Leave it out"):
        DiffusionUNet(pretrained=name, train_timesteps=1000)
    alone = f"{name}/unet"
    with pytest.raises(ValueError, match=r"has no scheduler .* or `train_timesteps`, `prediction_type`"):
        DiffusionUNet(pretrained=alone, beta_schedule="linear")
    other = DiffusionUNet(alone, train_timesteps=9, beta_schedule="linear", prediction_type="epsilon")
    assert len(other.noise_schedule.betas) == 9
    for scheduler, reason in (
        (ScoreSdeVeScheduler(), "is a ScoreSdeVeScheduler, whose noise"),
        (DDPMScheduler(prediction_type="sample"), "has `prediction_type='sample'`"),
        (DDPMScheduler(variance_type="learned_range"), "has `variance_type='learned_range'`"),
    ):
        scheduler.save_pretrained(tmp_path / "in" / "scheduler")
        with pytest.raises(ValueError, match=reason):
            DiffusionUNet(pretrained=name)


def test_a_checkpoint_of_another_noise_schedule_is_refused():
    checkpoint = {}
    built(train_timesteps=50).on_save_checkpoint(checkpoint)
    built(train_timesteps=50).on_load_checkpoint(checkpoint)
    arguments = {"train_timesteps": 1000, "beta_schedule": "linear", "prediction_type": "epsilon"}
    earlier = {"hyper_parameters": arguments}
    for saved in (checkpoint, earlier):
        with pytest.raises(ValueError, match="was trained with another noise schedule, `train_timesteps: "):
            built().on_load_checkpoint(saved)
    built(beta_schedule="linear").on_load_checkpoint(earlier)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Give `pretrained`, or `config`"):
        DiffusionUNet()
    with pytest.raises(ValueError, match="diffusers can't build this UNet2DModel"):
        DiffusionUNet(config={"down_block_types": ["NoBlock"]}).configure_model()
    with pytest.raises(ValueError, match="is neither a folder with a UNet"):
        arguments = {"train_timesteps": 9, "beta_schedule": "linear", "prediction_type": "epsilon"}
        DiffusionUNet(pretrained=str(tmp_path), **arguments).configure_model()

    class Data(ImageData):
        def prepare_data(self):
            pass

        def make_samples(self):
            return [], []

    with pytest.raises(ValueError, match="`image_size=9` can't be halved 1 times"):
        quiet_trainer().fit(DiffusionUNet(config=TINY), datamodule=Data("images", image_size=9))
