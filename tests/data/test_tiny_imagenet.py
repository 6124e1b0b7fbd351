"""Tiny ImageNet's folder, written small with pillow, and what is wrong with damaged ones."""

import numpy as np
import pytest
from PIL import Image

from bflcore import DataError
from bflcore.data.tiny_imagenet import TinyImageNet

CLASSES = ("n02", "n01")  # in the order of wnids.txt, which is not that of their names
COLOURS = {"n02": (250, 0, 0), "n01": (0, 0, 250)}


def save(path, colour, mode="RGB", side=64):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), colour).save(path, "JPEG", quality=100)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    for name, colour in COLOURS.items():
        for k in range(2):
            save(tmp_path / "train" / name / "images" / f"{name}_{k}.JPEG", colour)
    save(tmp_path / "val" / "images" / "val_0.JPEG", COLOURS["n01"])
    save(tmp_path / "val" / "images" / "val_1.JPEG", 100, "L")
    (tmp_path / "val" / "val_annotations.txt").write_text(
        "val_1.JPEG\tn02\t0\t0\t63\t63\nval_0.JPEG\tn01\t0\t32\t44\t62\n"
    )
    return tmp_path


def test_training_and_validation_images_are_pooled_as_bytes(folder):
    data = TinyImageNet().load(folder)
    assert data.x.shape == (6, 3, 64, 64)
    assert (data.x.dtype, data.unit, data.classes) == (np.uint8, 255.0, 2)
    assert data.y.tolist() == [0, 0, 1, 1, 0, 1]
    assert data.x_test is None
    expected = [COLOURS["n02"], COLOURS["n01"], (100, 100, 100), COLOURS["n01"]]
    found = data.x[[0, 2, 4, 5]].mean((2, 3))
    np.testing.assert_allclose(found, expected, atol=8)  # JPEG rounds colours


def test_the_folder_above_will_do(folder, tmp_path_factory):
    above = tmp_path_factory.mktemp("data")
    folder.rename(above / "tiny-imagenet-200")
    assert len(TinyImageNet().load(above).x) == 6


@pytest.mark.parametrize("given", [True, False])
def test_an_absent_folder_says_which_commands_get_it(tmp_path, given):
    with pytest.raises(DataError, match=r"curl -O http.*tiny-imagenet-200.zip && unzip") as refused:
        TinyImageNet().load(tmp_path if given else None)
    assert "\n" not in str(refused.value)


def test_a_class_without_images_is_named(folder):
    for path in (folder / "train" / "n01" / "images").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"n01/images has no \*.JPEG.* unpack"):
        TinyImageNet().load(folder)


@pytest.mark.parametrize("line", ["val_0.JPEG\tn03\t0", "val_0.JPEG", "val_0.JPEG n01"])
def test_a_damaged_table_is_named_with_its_line(folder, line):
    table = folder / "val" / "val_annotations.txt"
    table.write_text(f"val_1.JPEG\tn02\t0\n{line}\n")
    with pytest.raises(DataError, match=r"val_annotations.txt, line 2: expected a file name"):
        TinyImageNet().load(folder)
    table.unlink()
    with pytest.raises(DataError, match=r"val_annotations.txt cannot be read: .* unpack"):
        TinyImageNet().load(folder)


def test_damaged_images_are_named(folder):
    path = folder / "train" / "n01" / "images" / "n01_1.JPEG"
    whole = path.read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"n01_1.JPEG cannot be read: .* unpack") as refused:
            TinyImageNet().load(folder)
        assert "\n" not in str(refused.value)
    path.unlink()
    save(path, (0, 0, 0), side=32)
    with pytest.raises(DataError, match=r"n01_1.JPEG has 32x32 pixels, not 64x64"):
        TinyImageNet().load(folder)
    path.unlink()
    (folder / "val" / "images" / "val_0.JPEG").unlink()
    with pytest.raises(DataError, match=r"val_0.JPEG cannot be read: "):
        TinyImageNet().load(folder)
