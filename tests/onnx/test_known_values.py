"""Sizes that exporters compute in the graph, and sizes that only a run can compare."""

import math
from fractions import Fraction

import numpy as np
import pytest
from tests.support.onnx_models import agree, text_model

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, import_onnx, nn
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.dims import floor_div, symbol
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.onnx.fold import _Open, _quotient

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


MEETINGS = {
    "Concat of an upsampled plane and the skip": (
        """agraph (float[N,1,H] x) => (float[N,2,K] y) {
          half = AveragePool <kernel_shape = [2], strides = [2]> (x)
          scales = Constant <value = float[3] {1, 1, 2}> ()
          again = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric",
                          nearest_mode = "floor"> (half, , scales)
          y = Concat <axis = 1> (x, again)
        }""",
        (2, 1, 6),
        (2, 1, 7),
        "float32[N,2,H]",
        r"6.*7|7.*6",
    ),
    "Add of two sizes": (
        """agraph (float[N,3] x) => (float[K,3] y) {
          pair = Concat <axis = 0> (x, x)
          four = Constant <value = float[4,3] {1,2,3,4,5,6,7,8,9,10,11,12}> ()
          y = Add(pair, four)
        }""",
        (2, 3),
        (3, 3),
        "float32[4,3]",
        r"6.*4|4.*6",
    ),
    "view(N, -1, 2)": (
        """agraph (float[N,T] x) => (float[N,K,2] y) {
          first = Constant <value = int64[1] {0}> ()
          sizes = Shape(x)
          n = Gather(sizes, first)
          rest = Constant <value = int64[2] {-1, 2}> ()
          shape = Concat <axis = 0> (n, rest)
          y = Reshape(x, shape)
        }""",
        (3, 4),
        (3, 5),
        "float32[N,T//2,2]",
        r"15.*12|12.*15",
    ),
    "Gemm of a flattened plane": (
        """agraph (float[N,1,H] x) => (float[N,2] y) {
          flat = Flatten(x)
          w = Constant <value = float[2,4] {1,2,3,4,5,6,7,8}> ()
          y = Gemm <transB = 1> (flat, w)
        }""",
        (2, 1, 4),
        (2, 1, 5),
        "float32[N,2]",
        r"5.*4|4.*5",
    ),
    "MatMul of a plane with itself": (
        """agraph (float[N,T] x) => (float[N,T] y) { y = MatMul(x, x) }""",
        (3, 3),
        (3, 4),
        "float32[N,T]",
        r"3.*4|4.*3",
    ),
}


@pytest.mark.parametrize("case", MEETINGS)
@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_sizes_that_nothing_proves_equal_are_compared_in_the_run(case, name):
    body, fits, clashes, type_, words = MEETINGS[case]
    rng = np.random.default_rng(0)
    module = agree(text_model(body), x=rng.standard_normal(fits).astype(np.float32))
    function = module.entry("predict")
    assert str(function.result("y").type) == type_
    run = engine(name).compile(function)
    held = {n: t.array for n, t in module.state.items()} | {"x": np.zeros(clashes, np.float32)}
    with pytest.raises(InvalidInput, match=words):
        run(*(held[p] for p in function.param_names))


def test_gradients_pass_sizes_that_are_compared_in_the_run():
    body, fits, *_ = MEETINGS["view(N, -1, 2)"]
    cell = nn.Imported(import_onnx(text_model(body)))
    weights = np.arange(2, dtype=np.float32)
    x = np.zeros(fits, np.float32)
    slope = grad(lambda x: (cell(x) * weights).sum())(x)
    np.testing.assert_array_equal(slope, np.tile(weights, (3, 2)))


def test_two_different_numbers_are_refused_at_import():
    model = text_model("""agraph (float[N,4] x) => (float[N,4] y) {
      three = Constant <value = float[3] {1, 2, 3}> ()
      y = Add(x, three)
    }""")
    with pytest.raises(InvalidInput, match="4 against 3"):
        import_onnx(model)


def test_windows_of_an_open_plane_have_the_size_that_the_exporter_computes():
    model = text_model("""agraph (float[N,1,H] x) => (int64[K] y, float[N,1,L] z) {
      one = Constant <value = int64 {1}> ()
      zero = Constant <value = int64 {0}> ()
      stride = Constant <value = int64 {3}> ()
      size = Shape <start = 2> (x)
      h = Squeeze(size)
      less = Sub(h, one)
      steps = Div(less, stride)
      windows = Add(steps, one)
      y = Range(zero, windows, one)
      z = MaxPool <kernel_shape = [1], strides = [3]> (x)
    }""")
    x = np.zeros((1, 1, 8), np.float32)
    function = agree(model, x=x).entry("predict")
    assert str(function.result("y").type) == "int64[(H+2)//3]"
    assert str(function.result("z").type) == "float32[N,1,(H+2)//3]"


@pytest.mark.parametrize("a", [2**53 + 1, 2**62 - 1, -(2**62) + 1, 7, -7])
@pytest.mark.parametrize("b", [1, 2, -2, 3])
def test_sizes_divide_exactly_and_towards_zero(a, b):
    assert _quotient(a, b) == math.trunc(Fraction(a, b))


def test_half_of_a_count_that_data_decide_is_not_folded_to_the_floor():
    """ONNX divides towards zero: (0 - 1) / 2 is 0, and a count is often 0."""
    h, count = symbol("H"), symbol("open_3_0")
    assert _quotient(h - 1, 2) == floor_div(h - 1, 2)
    with pytest.raises(_Open):
        _quotient(count - 1, 2)
