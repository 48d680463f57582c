import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.array([1.0, 2.0], np.float32)


def function(body, *names):
    build = Build(TABLE, "f")
    with build:
        results = body(*(build.param(n, TensorSpec((2,))) for n in names))
    return build.finish(results)


@pytest.mark.parametrize("stem", ["v", "c"])
def test_users_names_never_meet_the_emitters_own(stem):
    names = [f"{stem}/{i}" for i in range(1, 5)]
    f = function(lambda a, b: {names[2]: a * b + 1.0, names[3]: ops.exp(a) * b}, *names[:2])
    first, second = engine("onnx").compile(f)(X, X)
    np.testing.assert_allclose(first, X * X + 1)
    np.testing.assert_allclose(second, np.exp(X) * X, rtol=1e-6)


def test_two_outputs_of_one_name_are_refused_by_name():
    for f in (
        function(lambda w: {"w": w * 2.0, "w:next": w}, "w"),
        function(lambda w, n: {"w": w + n}, "w", "w:next"),
    ):
        with pytest.raises(InvalidInput, match=r"'w:next'.*rename"):
            engine("onnx").compile(f)


def test_a_function_without_results_is_refused_by_name():
    with pytest.raises(InvalidInput, match="'f' has no results"):
        engine("onnx").compile(function(lambda _: {}, "w"))
