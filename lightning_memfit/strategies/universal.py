"""Resuming a ZeRO run with another number of ranks or another stage, through DeepSpeed's universal checkpoints."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

_TAG = "universal"


@dataclass(frozen=True)
class SavedRun:
    """How a checkpoint folder was written.

    Attributes:
        stage: ZeRO stage.
        world_size: Number of ranks.
    """

    stage: int
    world_size: int

    @classmethod
    def read(cls, folder: Path) -> "SavedRun":
        """Read it from the optimizer's files, which are mapped and not loaded.

        Raises:
            ValueError: If the folder holds no states of a ZeRO optimizer.
        """
        latest = folder / "latest"
        files = sorted((folder / latest.read_text().strip()).glob("*_optim_states.pt")) if latest.is_file() else []
        if not files:
            raise ValueError(
                f"`ckpt_path={str(folder)!r}` holds no optimizer states of a ZeRO strategy, to go on training from. "
                "For one file with whole weights use stage 3 with `load_full_weights: true`."
            )
        saved = torch.load(files[0], map_location="cpu", weights_only=False, mmap=True)
        return cls(int(saved["optimizer_state_dict"]["zero_stage"]), len(files))

    def needs_conversion(self, stage: int, world_size: int) -> bool:
        """Whether a run must go through a universal checkpoint to resume from this one.

        Raises:
            ValueError: If that would not be exact. Stage 3's conversion changes the moments a little: the next losses
                of a small GPT-2 differ by 2e-4. Between stage 3 and the others DeepSpeed 0.19 fails.
        """
        if (stage, world_size) == (self.stage, self.world_size):
            return False
        if 3 in (stage, self.stage):
            raise ValueError(
                f"`ckpt_path` was written by stage {self.stage} on {self.world_size} ranks, and can't go on exactly "
                f"with stage {stage} on {world_size}. Use the same stage and number of ranks; or start a new "
                "optimizer from the weights: `memfit export` writes a folder for the model's `pretrained`."
            )
        return True


def convert(folder: Path) -> None:
    """Write a universal checkpoint into a checkpoint folder of stage 1 or 2, beside what is there.

    It takes 12 bytes per parameter. One that was finished is kept.
    """
    if (folder / f"latest_{_TAG}").is_file():
        return
    from deepspeed.checkpoint.ds_to_universal import main

    source = folder / (folder / "latest").read_text().strip()
    main(
        Namespace(
            input_folder=str(source),
            output_folder=str(folder / _TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # Lightning saves no description of the parameters for this
        )
    )
