"""Folders of images as sources; Pillow is the oracle for JPEG and for unusual kinds of PNG."""

import io
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tests.support.images import chunk, folder_of_pets, header, png_file
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, MissingExtra, NotFound, TriplaneError
from triplane.unified_ir import data
from triplane.unified_ir.cli import shell
from triplane.unified_ir.data.sources import decoding, folder
from triplane.unified_ir.data.sources.folder import ImageFolderSource
from triplane.unified_ir.files.resize import resized

RNG = np.random.default_rng(0)
SMOOTH = np.add.outer(np.arange(24) * 5, np.arange(40) * 3)
PHOTO = np.stack([SMOOTH, SMOOTH[::-1], 255 - SMOOTH], -1).astype(np.uint8)


def bytes_of(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def pets(tmp_path):
    return folder_of_pets(tmp_path)


def test_class_folders_become_labels(pets):
    table = opened(ImageFolderSource(str(pets)))
    assert table.labels == ("cat", "dog")
    assert table.pixels == {"x": 255}
    assert {name: str(f) for name, f in table.schema.items()} == {
        "x": "uint8[1, 1, 2]", "y": "int64"
    }  # fmt: skip
    block = table.take(np.array([2, 0, 2]))
    assert block["x"][:, 0, 0, 0].tolist() == [2, 3, 2]
    assert block["y"].tolist() == [1, 0, 1]
    assert table.take(np.array([], np.int64))["x"].shape == (0, 1, 1, 2)


def test_folders_of_class_folders_become_a_column(pets):
    """As of persons or cameras; a class that one of them does not have keeps its number."""
    for person, label, value in [("bob", "cat", 5), ("ann", "dog", 6), ("ann", "cow", 7)]:
        (pets / "all" / person / label).mkdir(parents=True)
        image = pets / "all" / person / label / "a.pgm"
        image.write_bytes(b"P5 2 1 255\n" + bytes([value, 0]))
    (pets / "all" / "notes.txt").write_text("skipped")
    table = opened(ImageFolderSource(str(pets / "all")))
    assert table.labels == ("cat", "cow", "dog")
    assert {name: str(f) for name, f in table.schema.items()} == {
        "x": "uint8[1, 1, 2]", "y": "int64", "folder": "text"
    }  # fmt: skip
    block = table.take(np.arange(3))
    assert block["x"][:, 0, 0, 0].tolist() == [7, 6, 5]
    assert block["y"].tolist() == table.column("y").tolist() == [1, 2, 0]
    assert block["folder"].tolist() == table.column("folder").tolist() == ["ann", "ann", "bob"]
    chosen = data.load(pets / "all", keep=["folder"])
    assert (chosen.labels, chosen.inputs, chosen.targets) == (table.labels, ("x",), ("y",))
    assert "folder" not in data.load(pets / "all").schema
    rest, held_out = data.load_split(pets / "all", fraction=0.5, group="folder")
    names = [set(np.asarray(part.column("folder"))) for part in (rest, held_out)]
    assert names in ([{"ann"}, {"bob"}], [{"bob"}, {"ann"}])


@pytest.mark.parametrize(
    ("made", "message"),
    [("ann/dog", r"ann holds class folders, but .*cat beside it does not"),
     ("cat/kitten/dog", r"cat holds class folders, but .*dog beside it does not")],
)  # fmt: skip
def test_folders_of_both_depths_are_refused(pets, made, message):
    (pets / made).mkdir(parents=True)
    with pytest.raises(InvalidInput, match=message):
        opened(ImageFolderSource(str(pets)))


def test_an_image_beside_the_folders_of_a_person_is_refused(pets):
    (pets / "all" / "ann" / "dog").mkdir(parents=True)
    for beside in (pets / "all" / "a.pgm", pets / "all" / "ann" / "a.pgm"):
        beside.write_bytes(b"P5 2 1 255\n12")
        with pytest.raises(InvalidInput, match=r"a\.pgm is beside the class folders"):
            opened(ImageFolderSource(str(pets / "all")))
        beside.unlink()


def test_images_without_class_folders_are_one_column(pets):
    table = opened(ImageFolderSource(str(pets / "dog")))
    assert list(table.schema) == ["x"]
    assert table.labels == ()
    assert table.take(np.array([1, 0]))["x"].ravel().tolist() == [2, 0, 1, 0]


def test_only_what_is_taken_is_decoded(pets):
    (pets / "dog" / "9.pgm").write_bytes(b"P5 damaged")
    table = opened(ImageFolderSource(str(pets)))
    assert len(table.take(np.array([0, 1, 2]))["x"]) == 3
    with pytest.raises(Corrupt, match=r"9\.pgm"):
        table.take(np.array([3]))
    (pets / "dog" / "1.pgm").unlink()
    with pytest.raises(NotFound, match=r"1\.pgm"):
        table.take(np.array([1]))


def test_images_of_several_sizes_are_named_or_resized(pets):
    photo = bytes_of(Image.fromarray(PHOTO))
    (pets / "dog" / "3.jpg").write_bytes(photo)
    with pytest.raises(InvalidInput, match=r"3\.jpg is .*\(3, 24, 40\), .*3\.pgm is \(1, 1, 2\)"):
        everything(ImageFolderSource(str(pets)))
    with pytest.raises(InvalidInput, match=r"size=\(H, W\) or \(C, H, W\) that all images"):
        everything(ImageFolderSource(str(pets), size=(8, 8)))
    x = everything(ImageFolderSource(str(pets), size=(8, 8), channels=3))["x"]
    assert x.shape == (4, 3, 8, 8)
    pixels = np.asarray(Image.open(io.BytesIO(photo))).transpose(2, 0, 1)
    assert (x[3] == resized(pixels[None], (8, 8))[0]).all()
    grey = everything(ImageFolderSource(str(pets), size=(24, 40), channels=1))["x"][3, 0]
    assert (grey == np.asarray(Image.open(io.BytesIO(photo)).convert("L"))).all()


def test_grey_and_coloured_images_are_loaded_with_a_size_of_three_numbers(pets, capsys):
    (pets / "dog" / "3.jpg").write_bytes(bytes_of(Image.fromarray(PHOTO)))
    assert data.load(pets, size=(3, 8, 8)).x.shape == (4, 3, 8, 8)
    assert shell.run(["data", "inspect", str(pets), "--size", "1x8x8"]) == 0
    assert "x: uint8[1, 8, 8]" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match=r"channels is 1 \(grey\) or 3 \(RGB\), got 2"):
        data.load(pets, size=(2, 8, 8))


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(PHOTO),
        Image.fromarray(PHOTO[..., 0]),
        Image.fromarray(PHOTO).convert("CMYK"),
        Image.fromarray(RNG.integers(0, 256, (7, 5, 3), np.uint8)),
    ],
    ids=["RGB", "grey", "CMYK", "noise"],
)
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}])
def test_jpeg_is_what_pillow_decodes(image, options):
    data = bytes_of(image, **options)
    by_pillow = Image.open(io.BytesIO(data))
    expected = np.asarray(by_pillow.convert("L" if by_pillow.mode == "L" else "RGB"))
    decoded = decoding.decoded_by_pillow(data, "a")
    assert (decoded == np.atleast_3d(expected).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("orientation", range(10))
def test_the_orientation_of_a_jpeg_is_applied(orientation):
    image = Image.fromarray(PHOTO)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = bytes_of(image, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (decoding.decoded_by_pillow(data, "a") == expected.transpose(2, 0, 1)).all()


def test_unusual_kinds_of_png_are_converted_by_the_stated_rules():
    rgb = Image.fromarray(PHOTO)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(SMOOTH.astype(np.uint8)))
    wide = (SMOOTH * 257).astype(np.uint16)
    palette = rgb.quantize(16)
    cases = [
        (alpha, PHOTO),
        (alpha.convert("LA"), np.asarray(rgb.convert("L"))),
        (palette, np.asarray(palette.convert("RGB"))),
        (Image.fromarray(wide), SMOOTH),
        (rgb.convert("1"), np.asarray(rgb.convert("1").convert("L"))),
    ]
    for image, expected in cases:
        decoded = decoding.decoded_png(bytes_of(image, "PNG"), "a")
        assert (decoded == np.atleast_3d(expected).transpose(2, 0, 1)).all(), image.mode


@given(rgb=st.lists(st.integers(0, 255), min_size=3, max_size=3))
def test_grey_is_what_pillow_computes(rgb):
    image = np.array(rgb, np.uint8).reshape(1, 1, 3)
    grey = decoding.with_channels(image.transpose(2, 0, 1), 1)
    assert grey.ravel().tolist() == [np.asarray(Image.fromarray(image).convert("L"))[0, 0]]
    assert (decoding.with_channels(grey, 3) == grey).all()


JPEG = bytes_of(Image.fromarray(PHOTO))
PROGRESSIVE = bytes_of(Image.fromarray(PHOTO), progressive=True)
ALPHA = bytes_of(Image.fromarray(PHOTO).convert("RGBA"), "PNG")


def with_size(jpeg, height, width):
    at = max(jpeg.find(b"\xff\xc0"), jpeg.find(b"\xff\xc2"))
    sizes = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return jpeg[: at + 5] + sizes + jpeg[at + 9 :]


@pytest.mark.parametrize(
    ("data", "family"),
    [
        (b"", Corrupt),
        (b"\xff\xd8", Corrupt),
        (JPEG[: len(JPEG) // 2], Corrupt),
        (JPEG[:-40], Corrupt),
        (PROGRESSIVE[: len(PROGRESSIVE) // 2], Corrupt),
        (with_size(JPEG, 9000, 8000), InvalidInput),
        (with_size(JPEG, 60_000, 60_000), TriplaneError),
        (PROGRESSIVE + b"\xff\xda" * 300, InvalidInput),
        (bytes_of(Image.fromarray(PHOTO), "GIF"), Corrupt),
        (bytes_of(Image.fromarray(PHOTO), "TIFF"), Corrupt),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", Corrupt),
    ],
)
def test_hostile_images_are_refused(data, family):
    with pytest.raises(family, match="the-name"):
        decoding.decoded_by_pillow(data, "the-name")


def test_a_png_of_too_many_pixels_is_refused_before_it_is_decoded():
    data = png_file(header(9000, 8000, colour=6), chunk(b"IDAT", b""), chunk(b"IEND", b""))
    with pytest.raises(InvalidInput, match="the-name has 8000 x 9000 pixels; 67108864 are read"):
        decoding.decoded_png(data, "the-name")


@settings(deadline=None, max_examples=200)
@given(data=st.data(), original=st.sampled_from([JPEG, PROGRESSIVE, ALPHA]))
def test_damaged_images_give_pixels_or_a_named_error(data, original):
    content = bytearray(original)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
        content[at] = data.draw(st.integers(0, 255))
    try:
        assert decoding.decoded_png(bytes(content), "the-name").ndim == 3
    except TriplaneError as error:
        assert "the-name" in str(error)
    try:
        assert decoding.decoded_by_pillow(bytes(content), "the-name").ndim == 3
    except TriplaneError as error:
        assert "the-name" in str(error)


def test_without_pillow_the_error_names_the_extra(pets, monkeypatch):
    (pets / "dog" / "3.jpeg").write_bytes(JPEG)
    (pets / "dog" / "4.png").write_bytes(ALPHA)
    monkeypatch.setitem(sys.modules, "PIL", None)
    table = opened(ImageFolderSource(str(pets), size=(2, 2), channels=1))
    assert len(table.take(np.array([0, 1, 2]))["x"]) == 3
    with pytest.raises(MissingExtra, match=r"3\.jpeg needs Pillow.*'triplane\[images\]'"):
        table.take(np.array([3]))
    with pytest.raises(MissingExtra, match=r"RGB with alpha; convert it first.*\[images\]"):
        table.take(np.array([4]))


def test_threads_decode_the_same_pixels(pets):
    for k in range(20):
        (pets / "dog" / f"b{k}.jpg").write_bytes(
            bytes_of(Image.fromarray((PHOTO + k).astype("u1")))
        )
    table = opened(ImageFolderSource(str(pets), size=(9, 9), channels=3))
    rows = np.arange(len(table))
    expected = table.take(rows)["x"]
    equal = []
    threads = [
        threading.Thread(target=lambda: equal.append((table.take(rows)["x"] == expected).all()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 4


def test_folders_that_are_no_source_say_so(pets, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(NotFound, match="has no image"):
        ImageFolderSource(str(empty)).open()
    (empty / "cat").mkdir()
    with pytest.raises(NotFound, match="has no image"):
        ImageFolderSource(str(empty)).open()
    with pytest.raises(NotFound, match="not a folder"):
        ImageFolderSource(str(empty / "none")).open()
    (pets / "dog" / "notes.txt").write_text("")
    with pytest.raises(InvalidInput, match=r"unsupported image format: .*notes\.txt is not \.png"):
        ImageFolderSource(str(pets)).open()
    (pets / "dog" / "notes.txt").unlink()
    (pets / "stray.png").write_bytes(ALPHA)
    with pytest.raises(InvalidInput, match=r"stray\.png is beside the class folders"):
        ImageFolderSource(str(pets)).open()
    (pets / "stray.png").unlink()
    monkeypatch.setattr(folder, "MAX_IMAGES", 2)
    with pytest.raises(InvalidInput, match="more than 2 images"):
        ImageFolderSource(str(pets)).open()


def test_options_are_checked():
    for size, channels in [((0, 5), None), ((5, 9000), None), (None, 2), (None, 4)]:
        with pytest.raises(InvalidInput):
            ImageFolderSource("a", size=size, channels=channels)


def test_an_image_file_beyond_the_limit_is_not_read(pets):
    with (pets / "dog" / "1.pgm").open("r+b") as file:
        file.truncate(folder.MAX_IMAGE_FILE_BYTES + 1)
    with pytest.raises(InvalidInput, match=r"1\.pgm .*at most"):
        everything(ImageFolderSource(str(pets)))
