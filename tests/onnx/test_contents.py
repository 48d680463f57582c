"""Sizes that exporters compute in the graph, and sizes that only a run can compare."""

import numpy as np
import pytest
from tests.onnx.test_import import agree, text_model

from triplane.unified_ir import import_onnx
from triplane.unified_ir.ir.text import function_text

EXPANDED = """
  i0 = Constant <value = int64[1] {0}> ()
  i1 = Constant <value = int64[1] {1}> ()
  minus = Constant <value = int64 {-1}> ()
  sizes = Shape(x)
  n = Gather(sizes, i0)
  t = Gather(sizes, i1)
  wanted = Concat <axis = 0> (%s)
  rank = Shape(wanted)
  ones = ConstantOfShape <value = int64[1] {1}> (rank)
  keeps = Mul(ones, minus)
  kept = Equal(wanted, keeps)
  shape = Where(kept, ones, wanted)
"""
"""What PyTorch's exporter writes for `expand`, where -1 keeps an axis."""


def test_expanding_a_class_token_keeps_its_sizes():
    model = text_model(
        """agraph (float[N,4,3] x) => (float[N,M,3] y) {
          token = Constant <value = float[1,1,3] {1,2,3}> ()
          places = Constant <value = float[1,5,1] {1,2,3,4,5}> ()
          last = Constant <value = int64[1] {-1}> ()"""
        + EXPANDED % "n, last, last"
        + """tokens = Expand(token, shape)
          all = Concat <axis = 1> (tokens, x)
          y = Add(all, places)
        }"""
    )
    x = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    function = agree(model, x=x).entry("predict")
    assert str(function.result("y").type) == "float32[N,5,3]"


def test_an_expanded_mask_is_not_claimed_to_have_the_sizes_of_the_scores():
    model = text_model(
        """agraph (float[N,T] x, float[N,2,T,T] scores) => (float[N,2,T,T] y) {
          axes = Constant <value = int64[2] {1, 2}> ()"""
        + EXPANDED % "n, i1, t, t"
        + """wide = Unsqueeze(x, axes)
          mask = Expand(wide, shape)
          y = Add(scores, mask)
        }"""
    )
    rng = np.random.default_rng(0)
    x, scores = rng.standard_normal((3, 5)), rng.standard_normal((3, 2, 5, 5))
    module = agree(model, x=x.astype(np.float32), scores=scores.astype(np.float32))
    assert "Sized" not in function_text(module.entry("predict"))


@pytest.mark.parametrize("fill", ["int64[1] {2}", "float[1] {2}", "bool[1] {1}"])
def test_a_small_filled_tensor_of_a_known_shape_is_a_constant(fill):
    model = text_model(f"""agraph (int64[N] x) => (int64[N] y) {{
      shape = Constant <value = int64[1] {{3}}> ()
      filled = ConstantOfShape <value = {fill}> (shape)
      whole = Cast <to = 7> (filled)
      sizes = ReduceSum(whole)
      y = Add(x, sizes)
    }}""")
    module = import_onnx(model)
    agree(model, x=np.arange(4))
    assert "Reduce" not in function_text(module.entry("predict"))
