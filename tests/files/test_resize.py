"""The oracle is onnxruntime's Resize with linear, half_pixel and antialias=1."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.resize import MAX_RESIZED_SIDE, resized


def resized_by_onnxruntime(images, size):
    node = onnx.helper.make_node(
        "Resize",
        ["x", "", "", "sizes"],
        ["y"],
        mode="linear",
        coordinate_transformation_mode="half_pixel",
        antialias=1,
    )
    value = onnx.helper.make_tensor_value_info
    kind = onnx.helper.np_dtype_to_tensor_dtype(images.dtype)
    shape = (*images.shape[:2], *size)
    graph = onnx.helper.make_graph(
        [node],
        "resize",
        [value("x", kind, images.shape)],
        [value("y", kind, shape)],
        [onnx.numpy_helper.from_array(np.array(shape, np.int64), "sizes")],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": images})[0]


SIDE = st.integers(1, 23)


@settings(deadline=None, max_examples=60)
@given(h=SIDE, w=SIDE, size=st.tuples(SIDE, SIDE), seed=st.integers(0, 99))
def test_floats_equal_onnxruntime(h, w, size, seed):
    images = np.random.default_rng(seed).normal(size=(2, 3, h, w)).astype(np.float32)
    expected = resized_by_onnxruntime(images, size)
    np.testing.assert_allclose(resized(images, size), expected, rtol=0, atol=2e-5)


@settings(deadline=None, max_examples=60)
@given(h=SIDE, w=SIDE, size=st.tuples(SIDE, SIDE), seed=st.integers(0, 99))
def test_bytes_are_the_rounded_floats(h, w, size, seed):
    images = np.random.default_rng(seed).integers(0, 256, (2, 3, h, w), np.uint8)
    y = resized(images, size)
    assert y.dtype == np.uint8
    exact = resized_by_onnxruntime(images.astype(np.float32), size)
    assert np.abs(y - exact).max(initial=0) <= 0.5 + 1e-3
    # onnxruntime rounds to bytes once more, between the two axes.
    assert np.abs(y - resized_by_onnxruntime(images, size).astype(int)).max(initial=0) <= 1


def test_halves_are_rounded_to_even():
    pairs = np.array([[1, 2], [2, 3], [0, 1], [254, 255]], np.uint8).reshape(4, 1, 1, 2)
    assert resized(pairs, (1, 1)).ravel().tolist() == [2, 2, 0, 254]


def test_an_image_does_not_depend_on_the_others():
    images = np.random.default_rng(1).normal(size=(7, 3, 33, 21)).astype(np.float32)
    together = resized(images, (8, 64))
    for k in range(7):
        assert (resized(images[k : k + 1], (8, 64))[0] == together[k]).all()


@pytest.mark.parametrize("dtype", ["u1", "f4"])
def test_an_image_of_that_size_is_not_changed(dtype):
    images = np.arange(24).reshape(1, 2, 3, 4).astype(dtype)
    assert resized(images, (3, 4)) is images


def test_no_images_stay_none():
    assert resized(np.zeros((0, 3, 5, 5), np.uint8), (2, 3)).shape == (0, 3, 2, 3)


@pytest.mark.parametrize(
    ("images", "size"),
    [
        (np.zeros((3, 4, 4), np.uint8), (2, 2)),
        (np.zeros((1, 1, 4, 4), np.int32), (2, 2)),
        (np.zeros((1, 1, 4, 4)), (2, 2)),
        (np.zeros((1, 1, 0, 4), np.uint8), (2, 2)),
        (np.zeros((1, 1, 4, 4), np.uint8), (0, 2)),
        (np.zeros((1, 1, 4, 4), np.uint8), (2, MAX_RESIZED_SIDE + 1)),
    ],
)
def test_what_cannot_be_resized_is_refused(images, size):
    with pytest.raises(InvalidInput, match="resize needs"):
        resized(images, size)
