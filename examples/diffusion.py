"""A diffusion model of images: a UNet of diffusers learns the noise that is added to them.

    memfit fit --config examples/diffusion.yaml --data.folder=images
    memfit fit --config examples/diffusion.yaml --config examples/diffusion_quick.yaml  # two steps on one CPU

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs diffusers, datasets and pillow.
`DDPMPipeline(module.network, module.noise).save_pretrained(FOLDER)` writes what draws images.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from datasets import load_dataset
from diffusers import DDPMScheduler, UNet2DModel
from PIL import ImageOps
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Denoiser(pl.LightningModule):
    """Train a UNet on images with values from -1 to 1; logs `train_loss`, the mean squared error of the noise.

    Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models", algorithm 1.

    Args:
        config: Arguments of `UNet2DModel`.
        learning_rate: Constant learning rate of AdamW.
    """

    def __init__(self, config: dict[str, Any], learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None
        self.noise: Any = DDPMScheduler(beta_schedule="squaredcos_cap_v2")

    def configure_model(self) -> None:
        if self.network is None:
            self.network = UNet2DModel(**self.hparams["config"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images = batch["pixel_values"]
        noise = torch.randn_like(images)
        times = torch.randint(self.noise.config.num_train_timesteps, (len(images),), device=images.device)
        predicted = self.network(self.noise.add_noise(images, noise, times), times).sample
        loss = F.mse_loss(predicted.float(), noise.float())
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"], betas=(0.95, 0.999))


class Images(pl.LightningDataModule):
    """All images below a folder, scaled and cut to squares.

    Args:
        folder: The folder.
        image_size: Pixels a side.
        batch_size: Images of an optimizer step; `MicroBatching` cuts it to fit.
        num_workers: Loader processes.
    """

    def __init__(self, folder: str, image_size: int = 128, batch_size: int = 64, num_workers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.images = load_dataset("imagefolder", data_dir=self.hparams["folder"], split="train")

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        size = (self.hparams["image_size"], self.hparams["image_size"])
        pixels = np.stack([np.asarray(ImageOps.fit(row["image"].convert("RGB"), size)) for row in rows])
        return {"pixel_values": torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1}

    def train_dataloader(self) -> DataLoader[Any]:
        size, workers = self.hparams["batch_size"], self.hparams["num_workers"]
        return DataLoader(self.images, size, shuffle=True, collate_fn=self.collate, num_workers=workers)  # type: ignore[arg-type]

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """A batch of the right shapes, for estimates without data: any data module may have this method."""
        size = self.hparams["image_size"]
        return {"pixel_values": torch.zeros(self.hparams["batch_size"], 3, size, size)}
