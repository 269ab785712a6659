"""`DiffusionUNet`: a diffusion model of images, with a UNet from diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.extras import require
from lightning_memfit.models.metrics import WeightedMean
from lightning_memfit.models.network_module import NetworkModule


class DiffusionUNet(NetworkModule):
    """Train a UNet of diffusers to tell the noise in an image, from random weights or a pretrained one.

    Batches are dictionaries with `pixel_values`, `(batch, channels, height, width)` floats, best from -1 to 1;
    `labels`, `(batch,)` integers, condition UNets that have classes. In every step each image gets noise of a random
    strength (Ho et al. 2020, "Denoising diffusion probabilistic models", algorithm 1). The module logs `train_loss`,
    `val_loss` and `test_loss`, the mean squared error; validation draws the same noise each time.

    Args:
        pretrained: Hub name or local folder of a `UNet2DModel` (in a pipeline's folder, its folder `unet`). Null:
            random weights.
        config: Arguments of `diffusers.UNet2DModel`, when `pretrained` is null.
        train_timesteps: Number of strengths of noise. Null, as for the next two: what the scheduler of `pretrained`
            says, whose other settings hold, too; 1000 without `pretrained`.
        beta_schedule: How the strength grows, as diffusers' DDPMScheduler names it. `squaredcos_cap_v2` without
            `pretrained`.
        prediction_type: What the network tells: the noise (`epsilon`, without `pretrained`) or a mixture with the image
            (`v_prediction`).
        learning_rate: Peak learning rate.
        min_learning_rate_fraction: Learning rate at the end of the cosine, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of weight matrices; biases and norms have none.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer, for example `betas: [0.95, 0.999]`.

    Raises:
        ModuleNotFoundError: If diffusers isn't installed.
        ValueError: If an argument is out of range, or says otherwise than the scheduler of `pretrained`; if that has
            no scheduler, or one of another kind of diffusion, and arguments are missing.
    """

    counted = "pixel_values"

    def __init__(
        self,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        train_timesteps: int | None = None,
        beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] | None = None,
        prediction_type: Literal["epsilon", "v_prediction"] | None = None,
        learning_rate: float = 1e-4,
        min_learning_rate_fraction: float = 0.0,
        warmup_steps: int = 0,
        weight_decay: float = 1e-6,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            learning_rate, min_learning_rate_fraction, warmup_steps, weight_decay, optimizer, optimizer_options
        )
        require("diffusers", "DiffusionUNet")
        if train_timesteps is not None and train_timesteps < 1:
            raise ValueError(f"`train_timesteps={train_timesteps}` must be at least 1.")
        if (pretrained is None) == (config is None):
            raise ValueError("Give `pretrained`, or `config` with the arguments of a new UNet2DModel, and not both.")
        self.save_hyperparameters()
        asked = {"train_timesteps": train_timesteps, "beta_schedule": beta_schedule, "prediction_type": prediction_type}
        self.noise_schedule = _noise_schedule(pretrained, asked)
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()

    @override
    def read_architecture(self) -> dict[str, Any]:
        """Return the arguments of the UNet."""
        from diffusers import UNet2DModel

        name = self.hparams["pretrained"]
        if name is None:
            return dict(self.hparams["config"])
        try:
            found: dict[str, Any] = UNet2DModel.load_config(_folder_of(name))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"`pretrained={name!r}` is neither a folder with a UNet of diffusers nor could it be fetched from the "
                f"Hugging Face hub ({reason}). Give a local folder, or `config` for random weights."
            ) from error
        if found.get("_class_name", "UNet2DModel") != "UNet2DModel":
            raise ValueError(
                f"`pretrained={name!r}` is a {found['_class_name']}, and DiffusionUNet trains a UNet2DModel."
            )
        return found

    @override
    def make_network(self) -> nn.Module:
        """Build the UNet."""
        from diffusers import UNet2DModel

        kind: Any = UNet2DModel
        network: nn.Module
        architecture = self.architecture  # refuses what is none before weights are read
        if self.hparams["pretrained"] is not None:
            folder = _folder_of(self.hparams["pretrained"])
            network = kind.from_pretrained(folder, torch_dtype=torch.get_default_dtype(), use_safetensors=True)
            return network
        try:
            network = kind(**architecture)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"`config`: diffusers can't build this UNet2DModel: {reason}.") from error
        return network

    @override
    def setup(self, stage: str) -> None:
        """Refuse images that the UNet can't halve as often as it does, before it is built."""
        side = getattr(getattr(self.trainer, "datamodule", None), "image_size", None)
        halvings = len(self.architecture.get("down_block_types", ())) - 1
        if side is not None and halvings > 0 and side % 2**halvings:
            raise ValueError(
                f"`image_size={side}` can't be halved {halvings} times, as the UNet does. Set `data.image_size` to a "
                f"multiple of {2**halvings}."
            )

    @override
    def forward(self, sample: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return what the network tells of noisy images, `(batch, channels, height, width)`."""
        return self.network(sample, timesteps, class_labels=labels).sample

    # --- the loss ---------------------------------------------------------------------------------------------------

    @override
    def _loss(self, batch: dict[str, torch.Tensor], generator: torch.Generator | None = None) -> torch.Tensor:
        images = batch["pixel_values"]
        on = images.device if generator is None else generator.device
        noise = torch.randn(images.shape, generator=generator, device=on, dtype=images.dtype).to(images.device)
        steps = torch.randint(len(self.noise_schedule.betas), (len(images),), generator=generator, device=on)
        steps = steps.to(images.device)
        noisy = self.noise_schedule.add_noise(images, noise, steps)
        target = noise
        if self.noise_schedule.config.prediction_type == "v_prediction":
            target = self.noise_schedule.get_velocity(images, noise, steps)
        told = self(noisy, steps, batch.get("labels") if self.network.class_embedding is not None else None)
        return F.mse_loss(told.float(), target.float())

    @override
    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        mean, size = getattr(self, f"{stage}_loss"), len(batch[self.counted])
        mean.update(self._loss(batch, torch.Generator().manual_seed(batch_idx)), size)
        self.log(f"{stage}_loss", mean, prog_bar=True, batch_size=size)

    # --- checkpoints and exports ------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the noise schedule; see `NetworkModule`."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[_SCHEDULE_KEY] = dict(self.noise_schedule.config)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that was trained with another noise schedule; see `NetworkModule`.

        Raises:
            ValueError: If it was.
        """
        super().on_load_checkpoint(checkpoint)
        given = {name: checkpoint.get("hyper_parameters", {}).get(name) for name in _ARGUMENTS}
        if _SCHEDULE_KEY in checkpoint:
            before = _scheduler_of(checkpoint[_SCHEDULE_KEY])
        elif None not in given.values():  # earlier versions trained what their arguments said, whatever `pretrained`
            before = _scheduler_of({of: given[name] for name, of in _ARGUMENTS.items()})
        else:
            return
        now = self.noise_schedule
        if before.config.prediction_type != now.config.prediction_type or not torch.equal(before.betas, now.betas):
            fix = ", ".join(f"`{name}: {before.config[of]}`" for name, of in _ARGUMENTS.items())
            raise ValueError(
                f"The checkpoint was trained with another noise schedule, {fix}, than this module's. Give these "
                "arguments, and as `pretrained`, if there is one, the folder of a UNet without a scheduler beside it."
            )

    def export(self, folder: str | Path) -> Path:
        """Write a folder of a pipeline that `diffusers.DDPMPipeline.from_pretrained` loads.

        For runs of several ranks, see `write_folder`.

        Raises:
            ValueError: If the folder is not empty, or the weights can't be made whole.
        """
        from lightning_memfit.models.trained import write_folder

        return write_folder(self.network, folder, self._write)

    def _write(self, target: Path, weights: dict[str, Any] | None) -> None:
        from diffusers import DDPMPipeline, UNet2DModel

        pipeline: Any = DDPMPipeline
        kind: Any = UNet2DModel
        network = self.network
        if weights is not None:  # diffusers writes what a network has
            network = kind.from_config(network.config)
            network.load_state_dict(weights, assign=True)
        pipeline(network, self.noise_schedule).save_pretrained(target)


# --- the noise schedule -----------------------------------------------------------------------------------------------

_SCHEDULE_KEY = "memfit_noise_schedule"
_ARGUMENTS = {
    "train_timesteps": "num_train_timesteps",
    "beta_schedule": "beta_schedule",
    "prediction_type": "prediction_type",
}
"""Arguments of `DiffusionUNet`, with the names that diffusers has for them."""
_OF_NEW_NETWORKS = {"train_timesteps": 1000, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "epsilon"}


def _noise_schedule(pretrained: str | None, asked: dict[str, Any]) -> Any:
    """Return the DDPMScheduler by which noise is added, that of a pretrained pipeline with all its settings.

    Args:
        pretrained: As given to `DiffusionUNet`.
        asked: Values of `_ARGUMENTS`; None where none was given.

    Raises:
        ValueError: If these and `pretrained` leave open what it is, or contradict each other.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    found, reason = (None, "") if pretrained is None else _read_scheduler(pretrained)
    if found is not None:
        schedule = _scheduler_of(found)
        for name, value in given.items():
            own = schedule.config[_ARGUMENTS[name]]
            if own != value:
                raise ValueError(
                    f"`{name}={value!r}`, but the scheduler of `pretrained={pretrained!r}` has {own!r}. Leave it out; "
                    "to train for another noise, give the folder of the UNet alone, and all of "
                    f"{', '.join(f'`{one}`' for one in _ARGUMENTS)}."
                )
        _refuse_other_diffusion(schedule, found, str(pretrained))
        return schedule
    missing = [f"`{name}`" for name in _ARGUMENTS if name not in given]
    if pretrained is not None and missing:
        raise ValueError(
            f"`pretrained={pretrained!r}` has no scheduler that says for which noise it was trained ({reason}). Give "
            f"the folder of the whole pipeline, or {', '.join(missing)}."
        )
    return _scheduler_of({_ARGUMENTS[name]: value for name, value in (_OF_NEW_NETWORKS | given).items()})


def _scheduler_of(config: dict[str, Any]) -> Any:
    from diffusers import DDPMScheduler

    kind: Any = DDPMScheduler
    return kind.from_config(config)


def _read_scheduler(pretrained: str) -> tuple[dict[str, Any] | None, str]:
    """Return a pipeline's configuration of its scheduler; or None, and why there is none."""
    from diffusers import DDPMScheduler

    kind: Any = DDPMScheduler
    folder, reason = Path(pretrained).expanduser(), ""
    for place in ({"subfolder": "scheduler"}, {}):  # older pipelines have everything in one folder
        try:
            return kind.load_config(str(folder) if folder.is_dir() else pretrained, **place), ""
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
    return None, reason


def _refuse_other_diffusion(schedule: Any, found: dict[str, Any], pretrained: str) -> None:
    known = {type(schedule).__name__, *(kind.__name__ for kind in schedule.compatibles)}
    kind, told, variance = (found.get("_class_name", ""), schedule.config.prediction_type, schedule.variance_type)
    if kind and kind not in known:
        has = f"is a {kind}, whose noise is another than DDPM's"
    elif told not in ("epsilon", "v_prediction"):
        has = f"has `prediction_type={told!r}`, and DiffusionUNet trains `epsilon` or `v_prediction`"
    elif variance.startswith("learned"):
        has = f"has `variance_type={variance!r}`, and DiffusionUNet trains no variance"
    else:
        return
    raise ValueError(f"`pretrained={pretrained!r}`: its scheduler {has}. Take another model.")


def _folder_of(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_dir():
        return name
    return str(path / "unet" if (path / "unet").is_dir() else path)
