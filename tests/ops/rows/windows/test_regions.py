"""Regions whose samples lie exactly on the border of the image, against onnxruntime."""

import numpy as np
import pytest
from tests.support.onnx_models import original, text_model

from triplane.unified_ir import import_onnx
from triplane.unified_ir.engines import engine

IMAGE = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)


@pytest.mark.parametrize(
    "box", [[3, 3, 5, 5], [3.5, 3.5, 4.5, 4.5], [-2, -2, 0, 0], [-1.5, 2, -0.5, 6]]
)
def test_a_sample_on_the_border_counts_and_one_beyond_does_not(box):
    model = text_model("""
agraph (float[1,2,4,4] x, float[1,4] rois, int64[1] batch) => (float[1,2,1,1] y) {
  y = RoiAlign <coordinate_transformation_mode = "output_half_pixel",
      output_height = 1, output_width = 1, sampling_ratio = 1> (x, rois, batch)
}""")
    feeds = {"x": IMAGE, "rois": np.array([box], np.float32), "batch": np.zeros(1, np.int64)}
    (wanted,) = original(model, **feeds)
    function = import_onnx(model).entry("predict")
    (result,) = engine("reference").compile(function)(*feeds.values())
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
