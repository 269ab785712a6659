"""`ImageData`: images of a folder of folders, one for each class, or of a data set of the hub.

What is drawn for a training image, its part and whether it is mirrored, follows from seed, epoch and image, so that a
resumed run sees the same images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedSamples, Visit, digest_of
from lightning_memfit.data.sources import content_hash, files_below, load_documents, validation_mask
from lightning_memfit.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_TRAIN, _VAL, _TEST = ("train", "training"), ("val", "valid", "validation", "dev"), ("test", "testing")
"""Names of folders of splits, in small or capital letters."""
_SMALLEST_PART, _LEAST_RATIO = 0.35, 3 / 4
_MOST_EXAMPLE_VALUES = 1 << 26

# --- where images are -------------------------------------------------------------------------------------------------


class Images(Protocol):
    """Images with their classes."""

    classes: list[str]

    @property
    def labels(self) -> np.ndarray:
        """`(images,)` classes, int64."""

    def name(self, index: int) -> str:
        """Name an image, in messages and for the split."""

    def open(self, index: int) -> Image:
        """Read an image."""


class ImageFiles:
    """Image files below a folder for each class, sorted; see `files_below`.

    Args:
        folder: The folder of these folders.

    Raises:
        ValueError: If there are no images, they are in no folder of a class, or can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.classes = sorted(child.name for child in _children(folder) if child.is_dir())
        self.files = files_below(folder, _ENDINGS)
        beside = next((file for file in self.files if file.parent == folder), None)
        if beside is not None:
            raise ValueError(
                f"`dataset={str(folder)!r}` has images, such as {beside.name!r}, in no folder of a class. Put each "
                "into the folder of its class, one for all if there are none."
            )
        if not self.files:
            raise ValueError(
                f"`dataset={str(folder)!r}` has no images. Wanted: a folder for each class, with {', '.join(_ENDINGS)} "
                "files."
            )
        counts = np.bincount(self.labels, minlength=len(self.classes))
        if not counts.all():
            empty = self.classes[int(counts.argmin())]
            raise ValueError(f"`dataset`: the folder {str(folder / empty)!r} has no images. Fill it or remove it.")

    @property
    def labels(self) -> np.ndarray:
        """`(images,)` classes, int64."""
        places = {name: place for place, name in enumerate(self.classes)}
        return np.array([places[file.relative_to(self.folder).parts[0]] for file in self.files], np.int64)

    def name(self, index: int) -> str:
        """Path of an image in the folder."""
        return self.files[index].relative_to(self.folder).as_posix()

    def open(self, index: int) -> Image:
        """Read an image; see `in_rgb`.

        Raises:
            ValueError: If it is damaged, or not of 8 or 16 bits.
        """
        from PIL import Image as PillowImage

        name = repr(str(self.files[index]))
        with _readable(name), PillowImage.open(self.files[index]) as image:
            image.load()
            return in_rgb(image, name)


class ImageRows:
    """Images of a data set from `datasets`.

    Args:
        rows: The data set.
        image_column: Column with the images.
        label_column: Column with the classes; None if there are none.

    Raises:
        ValueError: If a column is missing or has something else.
    """

    def __init__(self, rows: Any, image_column: str, label_column: str | None) -> None:
        for argument, column, kind in (
            ("image_column", image_column, "Image"),
            ("label_column", label_column, "ClassLabel"),
        ):
            found = None if column is None else rows.features.get(column)
            if column is not None and type(found).__name__ != kind:
                there = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in rows.features.items())
                raise ValueError(f"`{argument}={column!r}` is no column of type {kind}. Columns: {there}.")
        self.rows = rows
        self.image_column = image_column
        self.label_column = label_column
        self.classes = ["image"] if label_column is None else list(rows.features[label_column].names)

    @property
    def labels(self) -> np.ndarray:
        """`(images,)` classes, int64."""
        if self.label_column is None:
            return np.zeros(len(self.rows), np.int64)
        column = self.rows[self.label_column][:]  # at once: `datasets` takes microseconds for each row otherwise
        labels = [-1 if label is None else label for label in column]
        if -1 in labels:  # as `datasets` marks images whose class isn't known
            raise ValueError(
                f"`label_column={self.label_column!r}`: {labels.count(-1):,} of {len(labels):,} images have no class, "
                f"row {labels.index(-1):,} the first of them. Choose another split, or set `labels: false`."
            )
        return np.array(labels, np.int64)

    def name(self, index: int) -> str:
        """Number of an image."""
        return str(index)

    def open(self, index: int) -> Image:
        """Read an image; see `in_rgb`.

        Raises:
            ValueError: If it is missing, damaged, or not of 8 or 16 bits.
        """
        name = f"in row {index:,} of {self.image_column!r}"
        with _readable(name):
            image = self.rows[index][self.image_column]
            if image is None:
                raise OSError("there is none")
            return in_rgb(image, name)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Say which image can't be read.

    Args:
        name: Its name, for messages.

    Raises:
        ValueError: If Pillow finds it damaged, or larger than what it takes for an attack on memory.
    """
    from PIL.Image import DecompressionBombError

    try:
        yield
    except (OSError, SyntaxError, DecompressionBombError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`dataset`: the image {name} can't be read: {reason}.") from error


_TURNS: dict[Any, str] = dict(
    enumerate(
        ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"), 2
    )
)
"""What sets an image upright, as Pillow names it, by its orientation (Exif 2.32, tag 0x0112)."""


def in_rgb(image: Image, name: str) -> Image:
    """Return an image upright in three channels of 8 bits, those of 16 bits divided by 256.

    It is turned as the camera has noted that it was held (EXIF), as `datasets` and transformers turn it, and its
    transparency is dropped, as by torchvision and transformers, so that a network is trained with what it will see.

    Args:
        image: An image in any of Pillow's modes.
        name: Its name, for messages.

    Raises:
        ValueError: If its values have no known range (modes `I` and `F`).
    """
    from PIL import Image as PillowImage

    mode, file_format = image.mode, image.format
    # `ImageOps.exif_transpose` would write all of the EXIF data anew, which fails for damaged ones.
    turn = _TURNS.get(image.getexif().get(0x0112))
    if turn is not None:
        image = image.transpose(PillowImage.Transpose[turn])
    # Pillow would cut values off at 255. Its older versions read a gray PNG of 16 bits in mode `I`.
    if mode.startswith("I;16") or (mode == "I" and file_format == "PNG"):
        return PillowImage.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if mode in ("I", "F") or ";" in mode:
        raise ValueError(
            f"`dataset`: the image {name} has values of mode {mode!r}, of which it isn't known what is black and what "
            "white. Save it with 8 or 16 bits a channel."
        )
    return image.convert("RGB")


# --- samples ----------------------------------------------------------------------------------------------------------


class ImageSamples(Dataset[dict[str, torch.Tensor]]):
    """Images of one size with their classes.

    Items are `pixel_values`, `(3, size, size)` float32, and `labels`, an int64 number. Asked for by a number, an image
    is scaled and its middle is taken; by a `Visit`, a part of it is, drawn for this epoch, and perhaps mirrored.

    Args:
        images: The images.
        chosen: `(samples,)` numbers of those that are used.
        size: Pixels a side.
        mean: Mean of each channel that is subtracted, of values from 0 to 1.
        std: Standard deviation of each channel, by which they are divided.
        augment: Whether parts are drawn.
        seed: Seed of what is drawn.
        with_labels: Whether items have `labels`.
    """

    def __init__(
        self,
        images: Images,
        chosen: np.ndarray,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool,
        seed: int,
        with_labels: bool,
    ) -> None:
        self.images = images
        self.chosen = chosen
        self.size = size
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)
        self.takes_visits = augment
        self.seed = seed
        self.labels = images.labels[chosen] if with_labels else None

    def content_digest(self) -> str:
        """Return a digest of the names of some of the images."""
        return digest_of(len(self), lambda place: self._name(place).encode("utf-8", "surrogateescape"))

    def _name(self, place: int) -> str:
        return self.images.name(int(self.chosen[place]))

    def __len__(self) -> int:
        return len(self.chosen)

    @override
    def __getitem__(self, place: int | Visit) -> dict[str, torch.Tensor]:
        from PIL import Image as PillowImage
        from PIL import ImageOps

        index = place.place if isinstance(place, Visit) else place
        image = self.images.open(int(self.chosen[index]))
        if isinstance(place, Visit):
            box, is_mirrored = _drawn_part(image.size, [self.seed, place.epoch, index])
            image = image.resize((self.size, self.size), PillowImage.Resampling.BICUBIC, box)
            image = ImageOps.mirror(image) if is_mirrored else image
        else:
            image = ImageOps.fit(image, (self.size, self.size), PillowImage.Resampling.BICUBIC)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        sample = {"pixel_values": (values - self.mean) / self.std}
        if self.labels is not None:
            sample["labels"] = torch.tensor(int(self.labels[index]))
        return sample


def _drawn_part(size: tuple[int, int], seed: list[int]) -> tuple[tuple[float, float, float, float], bool]:
    """Draw a part of an image, as (left, top, right, bottom), and whether it is mirrored.

    Args:
        size: Width and height in pixels.
        seed: What both follow from.

    Returns:
        At least 35 % of the area, with sides in a ratio from 3:4 to 4:3; the largest such part in the middle if ten
        draws don't lie within the image (Szegedy et al. 2015, "Going deeper with convolutions", section 6, with a
        larger smallest part, as is usual for fine-tuning).
    """
    generator = np.random.default_rng(seed)
    width, height = size
    is_mirrored = bool(generator.random() < 0.5)
    for _ in range(10):
        area = width * height * generator.uniform(_SMALLEST_PART, 1)
        ratio = np.exp(generator.uniform(np.log(_LEAST_RATIO), -np.log(_LEAST_RATIO)))
        across, down = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = generator.uniform(0, width - across), generator.uniform(0, height - down)
            return (float(left), float(top), float(left + across), float(top + down)), is_mirrored
    across, down = min(width, height / _LEAST_RATIO), min(height, width / _LEAST_RATIO)
    left, top = (width - across) / 2, (height - down) / 2
    return (left, top, left + across, top + down), is_mirrored


# --- the data module --------------------------------------------------------------------------------------------------


class ImageData(BatchedSamples):
    """Images for `ImageClassifier` and `DiffusionUNet`.

    A local folder has one folder for each class, or `train` and `val` (or `valid`, `validation`, `dev`) with these in
    them, as torchvision's ImageFolder and `datasets` have it. A folder `test` is left out, or validated with if it is
    the only one beside `train`. Images of 16 bits are scaled to 8. Training images are parts drawn anew in each epoch
    and mirrored half of the time.

    Args:
        dataset: Local folder, or a hub name.
        image_size: Pixels a side.
        mean: Mean of each channel that is subtracted, of values from 0 to 1. Those of the pretrained model.
        std: Standard deviation of each channel.
        augment: Draw parts of training images; otherwise they are scaled, and the middle is taken.
        labels: Give each image its class.
        image_column: Column of a hub data set with the images.
        label_column: Column of a hub data set with the classes.
        dataset_config: Configuration of a hub data set.
        split: Split of a hub data set to train on.
        val_split: Split of a hub data set to validate with. Null: `val_fraction` of the images.
        batch_size: Images in a micro-batch of one device.
        global_batch_size: Images in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the images kept for validation, chosen by their names, where none are set apart.
        num_workers: Loader processes, which read and scale images.
        seed: Seed for the order of the training images and their parts.
        cache_dir: Where `datasets` keeps its files.

    Raises:
        ModuleNotFoundError: If Pillow isn't installed.
        ValueError: If a number is out of range; when the data are read, if there are no images.
    """

    def __init__(
        self,
        dataset: str,
        image_size: int = 224,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        augment: bool = True,
        labels: bool = True,
        image_column: str = "image",
        label_column: str = "label",
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        batch_size: int = 32,
        global_batch_size: int | None = None,
        val_fraction: float = 0.1,
        num_workers: int = 4,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, global_batch_size, val_fraction, num_workers, seed)
        if image_size < 1:
            raise ValueError(f"`image_size={image_size}` must be at least 1.")
        for argument, values in (("mean", mean), ("std", std)):
            if len(values) != 3 or (argument == "std" and min(values) <= 0):
                raise ValueError(f"`{argument}={list(values)}` must be three numbers, those of `std` above 0.")
        self.dataset = dataset
        self.image_size = image_size
        self.mean, self.std = tuple(mean), tuple(std)
        self.augment = augment
        self.with_labels = labels
        self.num_classes: int | None = None
        """Number of classes; None before `setup`, and without labels."""
        self.classes: list[str] | None = None
        """Names of the classes, in the order of their numbers; None before `setup`, and without labels."""
        self.save_hyperparameters()

    @override
    def prepare_data(self) -> None:
        """Download the data in one process."""
        self._images(self.hparams["split"])

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """List the images, and split them."""
        images = self._images(self.hparams["split"])
        held_out = self._held_out(images)
        chosen = np.arange(len(images.labels))
        if held_out is None:
            mask = self._validation(images)
            held_out, val, chosen = images, chosen[mask], chosen[~mask]
        else:
            val = np.arange(len(held_out.labels))
        if self.with_labels:
            self.num_classes, self.classes = len(images.classes), list(images.classes)
        options = (self.image_size, self.mean, self.std)
        return (
            ImageSamples(images, chosen, *options, self.augment, self.seed, self.with_labels),
            ImageSamples(held_out, val, *options, False, self.seed, self.with_labels),
        )

    def _validation(self, images: Images) -> np.ndarray:
        hashes = [content_hash(images.name(index)) for index in range(len(images.labels))]
        return validation_mask(np.array(hashes, np.uint64), self.val_fraction)

    def _images(self, split: str) -> Images:
        require("PIL", "ImageData")
        folder = Path(self.dataset).expanduser()
        if folder.is_dir():
            self._check_local()
            return ImageFiles(_splits_in(folder)[0] or folder)
        if folder.exists():
            raise ValueError(f"`dataset={self.dataset!r}` is a file. Name a folder with a folder for each class.")
        rows = load_documents(self.dataset, self.hparams["dataset_config"], split, self.hparams["cache_dir"])
        return ImageRows(rows, self.hparams["image_column"], self.hparams["label_column"] if self.with_labels else None)

    def _check_local(self) -> None:
        """Refuse what says which rows of the hub to read, and would not be heard."""
        for argument, default in (("dataset_config", None), ("split", "train"), ("val_split", None)):
            value = self.hparams[argument]
            if value != default:
                raise ValueError(
                    f"`{argument}={value!r}` is for data sets of the hub, and `dataset={self.dataset!r}` is a folder. "
                    "Leave it out; the folders `train` and `val` in it tell apart what is trained on."
                )

    def _held_out(self, images: Images) -> Images | None:
        """Images that are set apart for validation; None if there are none.

        Raises:
            ValueError: If they have other classes.
        """
        folder = Path(self.dataset).expanduser()
        found: Images | None = None
        if folder.is_dir():
            held_out = _splits_in(folder)[1]
            found = None if held_out is None else ImageFiles(held_out)
        elif self.hparams["val_split"] is not None:
            found = self._images(self.hparams["val_split"])
        if found is not None and found.classes != images.classes:
            raise ValueError(
                f"`dataset={self.dataset!r}`: the validation images have other classes than those for training: "
                f"{sorted(set(found.classes) ^ set(images.classes))[:3]}. Give both a folder for each class."
            )
        return found

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data; `vocab_size` is not needed.

        Returns:
            `pixel_values`, `(batch_size, 3, image_size, image_size)` float32, and `labels`, `(batch_size,)` int64.
        """
        self._check_global_batch_size()
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        if np.prod(shape) > _MOST_EXAMPLE_VALUES:
            raise ValueError(
                f"`batch_size={self.batch_size}` x 3 x {self.image_size} x {self.image_size} values are too many for a "
                "batch that is only looked at. Estimate a smaller one; `--micro-batch-size` says what another needs."
            )
        batch = {"pixel_values": torch.zeros(shape)}
        return {**batch, "labels": torch.arange(self.batch_size) % 2} if self.with_labels else batch


def _splits_in(folder: Path) -> tuple[Path | None, Path | None]:
    """Return the folders to train on and to validate with; None where there is none, as in a folder of classes.

    Raises:
        ValueError: If there are folders beside that of training of which it isn't known what they are.
    """
    names = {child.name: child.name.lower() for child in _children(folder) if child.is_dir()}
    train, val, test = ([name for name in names if names[name] in kind] for kind in (_TRAIN, _VAL, _TEST))
    others = [name for name in names if name not in (*train, *val, *test)]
    # A class may be called so as well. Then its images lie in its folder.
    if not train or (others and not _is_folder_of_folders(folder / train[0])):
        return None, None
    doubtful = others + train[1:] + val[1:]
    if doubtful:
        raise ValueError(
            f"`dataset={str(folder)!r}` has its images for training in {train[0]!r}, and beside it {doubtful[0]!r}, "
            f"which is none of {', '.join(_VAL + _TEST)}, or a second one. Move it elsewhere; if {train[0]!r} is a "
            "class, give it another name."
        )
    held_out = (val + test)[:1]
    return folder / train[0], folder / held_out[0] if held_out else None


def _is_folder_of_folders(folder: Path) -> bool:
    children = _children(folder)
    has_images = any(child.suffix.lower() in _ENDINGS for child in children)
    return not has_images and any(child.is_dir() for child in children)


def _children(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without what is hidden, which `files_below` leaves out, too."""
    return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
