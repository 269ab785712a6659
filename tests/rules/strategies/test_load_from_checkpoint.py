"""`load_from_checkpoint` takes the folder of a sharded checkpoint (Lightning issue 11947)."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.distributed.checkpoint import save

from lightning_memfit import AtomicCheckpointIO
from lightning_memfit.strategies.integrity import FSDP2_MARK, CheckpointError, replacing_folder


class Scaled(LightningModule):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 2)


def test_a_folder_is_loaded_and_checked(tmp_path):
    module = Scaled(3.0)
    with replacing_folder(tmp_path / "a.ckpt", FSDP2_MARK) as folder:
        save({"state_dict": module.state_dict()}, checkpoint_id=folder, no_dist=True)
        torch.save(
            {"hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.0"}, folder / FSDP2_MARK
        )
    loaded = Scaled.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams.scale == 3.0
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    read = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(read["state_dict"]["layer.weight"], module.layer.weight)
    assert "optimizer_states" not in read  # Lightning refuses to go on without them
    shard = next((tmp_path / "a.ckpt").glob("*.distcp"))
    written = bytearray(shard.read_bytes())
    written[len(written) // 2] ^= 1
    shard.write_bytes(written)
    with pytest.raises(CheckpointError, match=r"a\.ckpt'` is damaged"):
        Scaled.load_from_checkpoint(tmp_path / "a.ckpt")
