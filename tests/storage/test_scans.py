"""Reading scans and photographs of all formats."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monai.utils import OptionalImportError
from PIL import Image

from monai_saliency.storage.scans import check_readers, load_image, scan_stem

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (5, 7), dtype=np.uint8)
DEEP = RNG.integers(0, 1 << 16, (5, 7)).astype(np.uint16)
COLOURS = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def pictures(folder: Path) -> dict[str, Any]:
    """Files, and the gray values ``(rows, columns)`` that are in them; None where they are of colours."""
    gray = Image.fromarray(GRAY)
    made = {
        "gray.png": (gray, GRAY),
        "deep.png": (Image.fromarray(DEEP), DEEP),
        "deep.tiff": (Image.fromarray(DEEP), DEEP),
        "float.tif": (Image.fromarray(GRAY / np.float32(7)), GRAY / np.float32(7)),
        "palette.png": (gray.convert("P").remap_palette([*range(255, -1, -1)]), GRAY),
        "alpha.png": (gray.convert("LA"), GRAY),
        "twice.png": (gray.convert("RGBA"), GRAY),
        "gray.jpg": (Image.fromarray(np.full((5, 7), 77, np.uint8)), np.full((5, 7), 77)),
        "colours.png": (Image.fromarray(COLOURS), None),
    }
    for name, (image, _) in made.items():
        image.save(folder / name)
    return {name: values for name, (_, values) in made.items()}


def test_photographs_are_read_in_gray_or_colours_and_lose_no_bits(tmp_path: Path) -> None:
    for name, values in pictures(tmp_path).items():
        gray, colours = (
            load_image(channels, ensure_channel_first=True)(tmp_path / name).numpy() for channels in (1, 3)
        )
        assert gray.shape == (1, 7, 5), name
        assert colours.shape == (3, 7, 5), name
        if values is None:
            np.testing.assert_array_equal(colours, np.moveaxis(COLOURS, -1, 0).swapaxes(1, 2))
        else:
            np.testing.assert_array_equal(gray[0].T, values.astype(np.float32), name)
            np.testing.assert_array_equal(colours, np.stack([gray[0]] * 3), name)


def test_a_file_of_several_pictures_is_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(GRAY), Image.fromarray(GRAY)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match="the file holds 2 pictures, 1 is expected: split it"):
        load_image(1)(tmp_path / "pages.tif")


#: By EXIF's orientation: the photograph's pixel at the top left of the picture, to the right of it, and below it.
CORNERS = {1: "0,0 0,1 1,0", 2: "0,6 0,5 1,6", 3: "4,6 4,5 3,6", 4: "4,0 4,1 3,0"}
CORNERS |= {5: "0,0 1,0 0,1", 6: "4,0 3,0 4,1", 7: "4,6 3,6 4,5", 8: "0,6 1,6 0,5"}


@pytest.mark.parametrize("suffix", ["tif", "png", "jpg"])
@pytest.mark.parametrize("turn", CORNERS)
def test_a_photograph_that_lies_on_its_side_is_turned(turn: int, suffix: str, tmp_path: Path, caplog: Any) -> None:
    """As viewers show it, and a line says so. Pillow (13.0) gives a gray TIFF the wrong pixels."""
    exif = Image.Exif()
    exif[274] = turn
    Image.fromarray(GRAY).save(tmp_path / f"a.{suffix}", exif=exif)
    with Image.open(tmp_path / f"a.{suffix}") as image:  # a JPEG loses some
        stored = np.asarray(image) if suffix == "jpg" else GRAY
    image = load_image(1, image_only=True)(tmp_path / f"a.{suffix}")
    shown = image.numpy().T
    first, right, below = (np.array(each.split(","), int) for each in CORNERS[turn].split())
    assert list(shown.shape) == image.meta["spatial_shape"].tolist()[::-1] == ([5, 7] if turn < 5 else [7, 5])
    for row, column in np.ndindex(shown.shape):
        assert shown[row, column] == stored[tuple(first + row * (below - first) + column * (right - first))]
    assert ("turned by its EXIF orientation" in caplog.text) == (turn > 1)


@pytest.mark.parametrize(("name", "extra"), [("a.mha", "itk"), ("a.nhdr", "itk"), ("a.TIF", "pillow")])
def test_missing_packages_give_their_pip_command(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("itk", "PIL"):
        monkeypatch.setitem(sys.modules, package, None)
    check_readers(["a.nii", "b.nii.gz", "c.npy"])
    with pytest.raises(OptionalImportError, match=rf'is not installed: pip install "monai-saliency\[{extra}\]"'):
        check_readers(["a.nii", name])


def test_scan_stem() -> None:
    names = {"a/b.c.nii.gz": "b.c", "x.NII": "x", "y.nii.gz": "y", "z.nrrd": "z", "w.b.PNG": "w.b"}
    assert {name: scan_stem(name) for name in names} == names
