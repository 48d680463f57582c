"""ImageDecoder on the reference: what it reads, in each order of channels, and what it refuses."""

import numpy as np
import pytest
from tests.support.images import encoded

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.data.image_files import image_decoder

RGB = np.random.default_rng(3).integers(0, 256, (4, 5, 3)).astype(np.uint8)
PPM = b"P6 5 4 255\n" + RGB.tobytes()
PGM = b"P5 5 4 255\n" + RGB[..., 0].tobytes()
PNG = encoded(RGB.astype(int), [0, 1, 4])


def decoded(data, **attrs):
    build = Build({("", "ImageDecoder"): image_decoder}, "f")
    with build:
        y = image_decoder(build.param("x", TensorSpec(("n",), "uint8")), **attrs)
    function = build.finish({"y": y})
    (found,) = ReferenceEngine().compile(function)(np.frombuffer(data, np.uint8))
    assert str(function.results[0].type).endswith(f",{found.shape[-1]}]")
    return found


@pytest.mark.parametrize("data", [PPM, PNG], ids=["ppm", "png"])
def test_pixels_come_out_in_the_order_asked_for(data):
    np.testing.assert_array_equal(decoded(data), RGB)
    np.testing.assert_array_equal(decoded(data, pixel_format="BGR"), RGB[..., ::-1])
    grey = decoded(data, pixel_format="Grayscale")
    assert grey.shape == (4, 5, 1)
    assert abs(grey[..., 0] - RGB @ [0.299, 0.587, 0.114]).max() <= 0.51


def test_grey_files_fill_the_channels_asked_for():
    np.testing.assert_array_equal(decoded(PGM), np.repeat(RGB[..., :1], 3, 2))
    np.testing.assert_array_equal(decoded(PGM, pixel_format="Grayscale"), RGB[..., :1])


@pytest.mark.parametrize(
    ("data", "family", "match"),
    [
        (b"\xff\xd8\xff\xe0 a JPEG", InvalidInput, "are JPEG"),
        (b"BM a bitmap", InvalidInput, "are BMP"),
        (b"P3 1 1 255\n1 1 1", InvalidInput, "a PNM of another kind"),
        (b"", InvalidInput, "are unknown"),
        (PPM[:-1], Corrupt, "bytes announced"),
        (PNG[:-30], Corrupt, "ImageDecoder's operand"),
    ],
    ids=["jpeg", "bmp", "ascii", "nothing", "short ppm", "short png"],
)
def test_other_bytes_are_refused_by_name(data, family, match):
    with pytest.raises(family, match=match):
        decoded(data)


def test_an_unknown_order_is_refused():
    with pytest.raises(InvalidInput, match="RGB, BGR, Grayscale, not 'HSV'"):
        decoded(PPM, pixel_format="HSV")
