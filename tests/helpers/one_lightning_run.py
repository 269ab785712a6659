"""Train a module written with `pytorch_lightning`, in a process that has imported the two names in some order.

Arguments: `first` imports `pytorch_lightning` before this package, `later` after it, `alone` where `lightning` isn't
installed; and a folder.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class WithoutLightning(PathFinder):
    """Finds everything but `lightning`."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "lightning" else PathFinder.find_spec(fullname, path, target)


def main(order: str, folder: Path) -> None:
    if order == "alone":
        sys.meta_path[:] = [WithoutLightning if finder is PathFinder else finder for finder in sys.meta_path]
    if order == "first":
        import pytorch_lightning as pl
    import lightning_memfit as memfit

    if order != "first":
        import pytorch_lightning as pl
    import torch

    class Deep(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)) for _ in range(3)
            )

        def training_step(self, batch, batch_idx):
            out = batch
            for block in self.blocks:
                out = out + block(out)
            return out.pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    def fit(*callbacks, **options):
        torch.manual_seed(0)
        module = Deep()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_steps=3, accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder, **quiet, **options
        )
        data = torch.utils.data.DataLoader(torch.linspace(-1, 1, 512).view(64, 8), batch_size=8)
        trainer.fit(module, data)
        assert trainer.global_step == 3
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    plain = fit()
    runs = [
        fit(memfit.MicroBatching(micro_batch_size=2)),
        fit(memfit.ActivationCheckpointing()),
        fit(memfit.MemFit(), memfit.MemoryPrediction()),
        fit(strategy=memfit.DataParallelStrategy(), use_distributed_sampler=False),
    ]
    for weights in runs:
        torch.testing.assert_close(weights, plain)
    profile = memfit.profile_module(Deep(), torch.zeros(8, 8))
    print("trained", pl.__name__, profile.micro_batch_size)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
