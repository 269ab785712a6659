import os
import sys

import numpy as np
import pytest
import torch

from lightning_memfit.data import ImageData
from lightning_memfit.data.images import ImageFiles, ImageRows, _drawn_part, in_rgb

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")


def fill(folder, counts, color=lambda name, number: (10 * number, 0, 0)):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (24 + number, 20), color(name, number)).save(folder / name / f"{number}.png")
    return str(folder)


def made(folder, **options):
    options = {"image_size": 8, "batch_size": 2, "num_workers": 0, "val_fraction": 0.3, **options}
    data = ImageData(folder, **options)
    data.setup("fit")
    return data


def test_a_folder_of_classes_becomes_batches(tmp_path):
    data = made(fill(tmp_path, {"cat": 6, "ant": 6}))
    assert data.num_classes == 2
    batch, example = next(iter(data.train_dataloader())), data.example_batch()
    assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
        name: (t.shape, t.dtype) for name, t in example.items()
    }
    assert len(data._train) + len(data._val) == 12
    names = {data._train.images.name(int(i)) for i in data._train.chosen}
    assert not names & {data._val.images.name(int(i)) for i in data._val.chosen}
    assert data._train.images.classes == ["ant", "cat"]
    for index, chosen in enumerate(data._train.chosen):
        is_cat = data._train.images.name(int(chosen)).startswith("cat/")
        assert int(data._train[index]["labels"]) == is_cat


def test_values_are_normalized(tmp_path):
    folder = fill(tmp_path, {"a": 4}, lambda *_: (255, 0, 51))
    data = made(folder, mean=[0.5, 0.0, 0.2], std=[0.25, 1.0, 1.0], augment=False, labels=False)
    sample = data._val[0]
    assert list(sample) == ["pixel_values"]
    torch.testing.assert_close(
        sample["pixel_values"].mean(dim=(1, 2)), torch.tensor([2.0, 0.0, 0.0]), atol=1e-6, rtol=0
    )


def test_folders_set_apart_are_used(tmp_path):
    fill(tmp_path / "train", {"a": 3, "b": 3})
    fill(tmp_path / "val", {"a": 1, "b": 2})
    data = made(str(tmp_path))
    assert (len(data._train), len(data._val)) == (6, 3)


@pytest.mark.parametrize(
    ("names", "held_out"),
    [("train valid test", 2), ("Training Testing", 3), ("train dev", 2), ("test train", 3), ("train .cache val", 2)],
)
def test_splits_are_no_classes(names, held_out, tmp_path):
    """They were three, with the images of the test among those for training."""
    for name in names.split():
        count = {"tra": 6, "tes": 3}.get(name.lower()[:3], 2)
        fill(tmp_path / name, {"a": count, "b": count})
    data = made(str(tmp_path))
    assert data.classes == ["a", "b"]
    assert (len(data._train), len(data._val)) == (12, 2 * held_out)


def test_what_lies_beside_splits_is_asked_for_and_a_class_may_be_called_train(tmp_path):
    fill(tmp_path / "train", {"a": 3})
    fill(tmp_path / "more", {"a": 3})
    with pytest.raises(ValueError, match="training in 'train', and beside it 'more', which is none of val, valid"):
        made(str(tmp_path))
    assert made(fill(tmp_path / "vehicles", {"train": 5, "car": 5, "test": 5})).num_classes == 3


@pytest.mark.filterwarnings("ignore:.*of its files only")
@pytest.mark.parametrize("split", ["", "train/"])
def test_what_is_hidden_is_no_class_and_no_image(split, tmp_path):
    """Jupyter's copies were a class of their own, or trained on twice; those of macOS can't be read."""
    fill(tmp_path, {f"{split}a": 6, f"{split}b": 6, f"{split}.ipynb_checkpoints": 2, f"{split}b/.thumbnails": 2})
    for name in (f"{split}a/._1.png", f"{split}._a.png"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    data = made(str(tmp_path), val_fraction=0.5)
    assert data.classes == ["a", "b"]
    assert len(data._train) + len(data._val) == 12
    assert all(data._train[index] for index in range(len(data._train)))


def test_a_linked_folder_of_a_class_is_read(tmp_path):
    fill(tmp_path, {"data/cat": 6, "elsewhere": 6})
    (tmp_path / "data" / "ant").symlink_to(tmp_path / "elsewhere")
    data = made(str(tmp_path / "data"))
    assert data.classes == ["ant", "cat"]
    assert len(data._train) + len(data._val) == 12


def half_and_half(tmp_path):
    """Images that are black on the left and white on the right."""
    (tmp_path / "a").mkdir()
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:, 15:] = 255
    for number in range(8):
        Image.fromarray(pixels).save(tmp_path / "a" / f"{number}.png")
    return str(tmp_path)


def test_parts_are_drawn_anew_in_each_epoch_and_again_when_resumed(tmp_path):
    folder = half_and_half(tmp_path)

    def epoch(number, **options):
        loader = made(folder, val_fraction=0.2, **options).train_dataloader()
        loader.sampler.set_epoch(number)
        return torch.cat([batch["pixel_values"] for batch in loader])

    assert torch.equal(epoch(0), epoch(0))
    assert torch.equal(epoch(1), epoch(1, num_workers=1))
    assert not torch.equal(epoch(0), epoch(1))
    values = epoch(0)
    sides = values[..., 0].mean(dim=(1, 2)) < values[..., -1].mean(dim=(1, 2))
    assert 0 < int(sides.sum()) < len(sides)  # some are mirrored
    assert torch.equal(epoch(0, augment=False)[0], epoch(5, augment=False)[0])


def test_a_part_lies_within_its_image():
    for seed in range(200):
        for size in ((40, 30), (400, 20)):
            (left, top, right, bottom), _ = _drawn_part(size, [seed])
            assert 0 <= left < right <= size[0] + 1e-9
            assert 0 <= top < bottom <= size[1] + 1e-9
            assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9


def test_what_is_no_folder_of_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        made(str(tmp_path / "empty"))
    fill(tmp_path / "some", {"a": 3})
    (tmp_path / "some" / "b").mkdir()
    with pytest.raises(ValueError, match="b' has no images. Fill it"):
        made(str(tmp_path / "some"))
    Image.new("RGB", (4, 4)).save(tmp_path / "some" / "beside.png")
    with pytest.raises(ValueError, match="in no folder of a class"):
        made(str(tmp_path / "some"))
    fill(tmp_path / "two" / "train", {"a": 3})
    fill(tmp_path / "two" / "val", {"b": 3})
    with pytest.raises(ValueError, match="other classes than those for training: \\['a', 'b'\\]"):
        made(str(tmp_path / "two"))


RAMP = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
HALF = np.dstack([np.full((4, 4), 40, np.uint8), np.tile(np.uint8([0, 0, 255, 255]), (4, 1))])


def test_16_bits_are_scaled_and_transparency_is_dropped(tmp_path):
    """Pillow cuts 16 bits off at 255."""
    (tmp_path / "a").mkdir()
    Image.fromarray(RAMP).save(tmp_path / "a" / "deep.png")
    Image.fromarray(HALF).save(tmp_path / "a" / "half.png")
    Image.fromarray(HALF[..., 0]).save(tmp_path / "a" / "hole.png", transparency=40)
    deep, half, hole = (np.asarray(ImageFiles(tmp_path).open(index)) for index in range(3))
    assert np.array_equal(deep, np.dstack([RAMP >> 8] * 3))
    assert (half == 40).all()
    assert (hole == 40).all()


def test_rows_are_read_as_files_are_and_values_of_no_range_refused():
    def opened(values):
        images = ImageRows.__new__(ImageRows)
        images.rows, images.image_column = [{"image": Image.fromarray(values)}], "image"
        return np.asarray(images.open(0))

    assert np.array_equal(opened(RAMP.astype(">u2")), np.dstack([RAMP >> 8] * 3))
    assert (opened(HALF) == 40).all()
    for values, mode in ((RAMP.astype(np.int32), "I"), (RAMP.astype(np.float32), "F")):
        with pytest.raises(ValueError, match=f"the image in row 0 of 'image' has values of mode '{mode}'"):
            opened(values)


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
def test_images_stand_upright_as_cameras_note_it(mode, tmp_path):
    """Photos of phones lay on their sides, and stood upright in data sets of the hub and in transformers' pipeline."""
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    values = np.arange(6, dtype=np.uint16 if mode == "I;16" else np.uint8).reshape(2, 3) * (256 if "16" in mode else 1)
    lying = Image.fromarray(np.dstack([values] * 3) if mode == "RGB" else values)
    lying.save(tmp_path / "a" / "0.png", exif=exif)
    found = np.asarray(ImageFiles(tmp_path).open(0))[..., 0]
    assert np.array_equal(found, np.rot90(np.arange(6).reshape(2, 3), -1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_ways_of_holding_a_camera_are_known_beside_damaged_notes(orientation, tmp_path):
    (tmp_path / "a").mkdir()
    lying = Image.fromarray(np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying.save(tmp_path / "a" / "0.png", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a" / "0.png")))
    assert np.array_equal(np.asarray(ImageFiles(tmp_path).open(0)), expected)
    exif[0x0128] = "inch"  # where a number belongs
    saved = lying.copy()
    saved.getexif().update(exif)
    assert np.array_equal(np.asarray(in_rgb(saved, "of a camera")), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_files_may_be_in_another_encoding(tmp_path):
    folder = fill(tmp_path, {"a": 4})
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / os.fsdecode(b"caf\xe9.png"))
    data = made(folder)
    assert len(data._train) + len(data._val) == 4
    assert data._train.content_digest() != data._val.content_digest()


def test_a_damaged_image_is_named(tmp_path):
    folder = fill(tmp_path, {"a": 4})
    for file in (tmp_path / "a").iterdir():
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"the image '.*png' can't be read"):
        made(folder)._val[0]


def test_an_image_as_large_as_an_attack_is_named(tmp_path, monkeypatch):
    """Pillow's error is none of its others', and named no file."""
    fill(tmp_path, {"a": 1})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"the image '.*0.png' can't be read: Image size \(480 pixels\) exceeds"):
        ImageFiles(tmp_path).open(0)


def test_rows_without_a_class_or_an_image_are_named():
    """A class of -1, as `datasets` marks images of a test, ended training in the loss, and on CUDA the process."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})

    def rows(images, labels):
        return ImageRows(datasets.Dataset.from_dict({"image": images, "label": labels}, features), "image", "label")

    for missing in (-1, None):
        with pytest.raises(ValueError, match="`label_column='label'`: 1 of 3 images have no class, row 2 the first"):
            _ = rows([None] * 3, [0, 1, missing]).labels
    damaged = rows([None, {"bytes": b"none", "path": None}], [0, 1])
    assert damaged.labels.tolist() == [0, 1]
    for index, reason in enumerate(("there is none", "cannot identify image file")):
        with pytest.raises(ValueError, match=f"the image in row {index} of 'image' can't be read: {reason}"):
            damaged.open(index)


def test_classes_of_rows_are_read_at_once(monkeypatch):
    """Row by row, a million of them took ten seconds, several times over."""
    datasets = pytest.importorskip("datasets", minversion="4")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"image": [None] * 3, "label": [0, 1, 1]}, features)
    monkeypatch.setattr(type(rows["label"]), "__iter__", None)
    assert ImageRows(rows, "image", "label").labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("options", [{"split": "test"}, {"val_split": "validation"}, {"dataset_config": "full"}])
def test_what_names_rows_of_the_hub_is_refused_of_a_folder(options, tmp_path):
    """It went unheard: what is held out was chosen by `val_fraction`."""
    (argument,) = options
    with pytest.raises(ValueError, match=f"`{argument}=.* is for data sets of the hub"):
        made(fill(tmp_path, {"a": 4}), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"image_size": 0}, "`image_size=0`"), ({"mean": [1.0]}, "`mean="), ({"std": [1.0, 0.0, 1.0]}, "`std=")],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ImageData("images", **options)
