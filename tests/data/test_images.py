import base64
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.images import chunk, encoded, folder_of_pets, header, png_file

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir import data
from triplane.unified_ir.data import views
from triplane.unified_ir.data.sources import folder
from triplane.unified_ir.files import png, pnm

# Written by another program's encoder, which chose filter 1 twice and filter 4 four times.
FOREIGN = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAGCAIAAACEmcMcAAAAHklEQVR42mNkYGDgFJKGI0ZRLXtkPgsJfHs4H6EEAGHxB+EI"
    "TabnAAAAAElFTkSuQmCC"
)
FOREIGN_PIXELS = np.add.outer(np.arange(6) * 21, np.arange(5) * 9) * np.arange(1, 4)[:, None, None]


IMAGES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3])).flatmap(
    lambda shape: hnp.arrays(np.uint8, shape)
)


@given(image=IMAGES, kinds=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_every_filter_of_png_is_undone(image, kinds):
    assert (png.decode(encoded(image.astype(int), kinds), "a") == image.transpose(2, 0, 1)).all()


def test_a_png_of_another_program_is_read():
    assert (png.decode(FOREIGN, "a") == FOREIGN_PIXELS % 256).all()


@given(image=IMAGES, top=st.integers(1, 255))
def test_pnm_is_scaled_so_that_its_maximum_is_white(image, top):
    image = np.minimum(image, top)
    h, w, c = image.shape
    magic = b"P5" if c == 1 else b"P6"
    content = magic + f"\n# a comment\n{w} {h}\n{top}\n".encode() + image.tobytes()
    assert np.abs(pnm.decode(content, "a") - image.transpose(2, 0, 1) / top * 255).max() <= 0.5


ROW = zlib.compress(b"\0ab")
PNG_ATTACKS = {
    "empty": (b"", Corrupt),
    "signature alone": (png.SIGNATURE, Corrupt),
    "a chunk longer than the file": (png_file(struct.pack(">I", 2**31) + b"IHDR"), Corrupt),
    "pixels before the header": (png_file(chunk(b"IDAT", ROW)), Corrupt),
    "a short header": (png_file(chunk(b"IHDR", b"\0" * 12)), Corrupt),
    "no end": (png_file(header(2, 1), chunk(b"IDAT", ROW)), Corrupt),
    "no pixels": (png_file(header(2, 1), chunk(b"IEND", b"")), Corrupt),
    "too few pixels": (png_file(header(3, 1), chunk(b"IDAT", ROW), chunk(b"IEND", b"")), Corrupt),
    "too many pixels": (png_file(header(1, 1), chunk(b"IDAT", ROW), chunk(b"IEND", b"")), Corrupt),
    "no zlib": (png_file(header(1, 1), chunk(b"IDAT", b"abc"), chunk(b"IEND", b"")), Corrupt),
    "filter 9": (
        png_file(header(2, 1), chunk(b"IDAT", zlib.compress(b"\x09ab")), chunk(b"IEND", b"")),
        Corrupt,
    ),
    "a wrong checksum": (FOREIGN.replace(b"IDAT", b"IDAX", 1), Corrupt),
    "a bomb": (
        png_file(
            header(1, 1), chunk(b"IDAT", zlib.compress(bytes(64 * 2**20))), chunk(b"IEND", b"")
        ),
        Corrupt,
    ),
    "sizes beyond memory": (png_file(header(2**31 - 1, 2**31 - 1)), InvalidInput),
    "size zero": (png_file(header(0, 0)), InvalidInput),
    "16 bits": (png_file(header(1, 1, depth=16)), InvalidInput),
    "a palette": (png_file(header(1, 1, colour=3)), InvalidInput),
    "alpha": (png_file(header(1, 1, colour=6)), InvalidInput),
    "interlacing": (png_file(header(1, 1, interlace=1)), InvalidInput),
    "an unknown critical chunk": (png_file(header(1, 1), chunk(b"EVIL", b"")), InvalidInput),
}
PNM_ATTACKS = {
    "empty": (b"", Corrupt),
    "header cut": (b"P5 2 2", Corrupt),
    "a header of comments": (b"P5" + b"#\n" * 10**6, Corrupt),
    "numbers of many digits": (b"P5 " + b"9" * 10**6, Corrupt),
    "text form": (b"P2 1 1 255 7", InvalidInput),
    "16 bits": (b"P5 1 1 65535\n\0\0", InvalidInput),
    "maximum zero": (b"P5 1 1 0\n\0", InvalidInput),
    "size zero": (b"P5 0 1 255\n", InvalidInput),
    "sizes beyond memory": (b"P6 999999999 999999999 255\n", InvalidInput),
    "values cut": (b"P5 2 2 255\nabc", Corrupt),
    "values added": (b"P5 2 2 255\nabcde", Corrupt),
    "a pixel above the maximum": (b"P5 1 1 10\n\x0b", Corrupt),
}


@pytest.mark.parametrize(("content", "family"), PNG_ATTACKS.values(), ids=PNG_ATTACKS)
def test_hostile_png_is_refused(content, family):
    with pytest.raises(family, match="the-name"):
        png.decode(content, "the-name")


@pytest.mark.parametrize(("content", "family"), PNM_ATTACKS.values(), ids=PNM_ATTACKS)
def test_hostile_pnm_is_refused(content, family):
    with pytest.raises(family, match="the-name"):
        pnm.decode(content, "the-name")


@given(at=st.integers(0, len(FOREIGN) - 1), value=st.integers(1, 255))
def test_any_changed_byte_of_a_png_is_refused(at, value):
    damaged = bytearray(FOREIGN)
    damaged[at] ^= value
    with pytest.raises(TriplaneError):
        png.decode(bytes(damaged), "a")


@given(cut=st.integers(0, len(FOREIGN) - 13))
def test_a_cut_png_is_refused(cut):
    with pytest.raises(Corrupt):
        png.decode(FOREIGN[:cut], "a")


@given(content=st.binary(max_size=64), magic=st.sampled_from([b"", b"P5 2 1 9\n", png.SIGNATURE]))
def test_nonsense_is_no_image(content, magic):
    for decode in (png.decode, pnm.decode):
        try:
            assert decode(magic + content, "a").ndim == 3
        except TriplaneError as error:
            assert "a" in str(error)


@pytest.fixture
def pets(tmp_path):
    return folder_of_pets(tmp_path)


def test_a_folder_of_classes_is_read_in_order_of_names(pets):
    dataset = data.load(pets)
    assert dataset.labels == ("cat", "dog")
    assert dataset.y.tolist() == [0, 1, 1]
    assert np.rint(dataset.x[:, 0, 0, 0] * 255).tolist() == [3, 1, 2]


def test_train_and_test_folders_are_two_parts(pets, tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    for part in ("train", "test"):
        (root / part).symlink_to(pets)
    train, held_out = data.load_split(root)
    assert len(train) == len(held_out) == 3


def test_images_of_another_size_are_named(pets):
    (pets / "dog" / "9.png").write_bytes(FOREIGN)
    with pytest.raises(InvalidInput, match=r"9\.png.*\(3, 6, 5\).*\(1, 1, 2\)"):
        _ = data.load(pets).x


def test_other_formats_are_named_with_those_read(pets):
    (pets / "dog" / "photo.gif").write_bytes(b"GIF89a")
    with pytest.raises(InvalidInput, match=r"photo\.gif is not \.png"):
        data.load(pets)


def test_an_image_file_beyond_the_limit_is_not_read(pets):
    with (pets / "dog" / "1.pgm").open("r+b") as file:
        file.truncate(folder.MAX_IMAGE_FILE_BYTES + 1)
    with pytest.raises(InvalidInput, match="at most"):
        _ = data.load(pets).x


def test_a_column_beyond_the_memory_limit_is_refused_while_reading(pets, monkeypatch):
    monkeypatch.setattr(views, "MAX_MEMORY_BYTES", 5)
    with pytest.raises(InvalidInput, match="more than 5 bytes in memory"):
        _ = data.load(pets).x


def test_folders_without_classes_or_images_say_so(tmp_path):
    with pytest.raises(NotFound, match="no image"):
        data.load(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(NotFound, match="no image"):
        data.load(tmp_path)
