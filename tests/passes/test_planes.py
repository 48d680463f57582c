import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.planes import merge_planes

# channels, filters, side, kernel, stride, dilation, padding, groups; which convolutions change
MERGED = {
    "3 x 3 over 2 x 2": ((128, 128, 2, 3, 1, 1, 1, 1), {"Conv", "ConvTranspose"}),
    "without padding": ((128, 128, 3, 3, 1, 1, 0, 1), {"Conv", "ConvTranspose"}),
    "over 4 x 4": ((64, 64, 4, 3, 1, 1, 1, 1), {"ConvTranspose"}),
    "by steps of 2": ((64, 64, 4, 3, 2, 1, 1, 1), {"Conv", "ConvTranspose"}),
    "by steps of 2, with rows left over": ((64, 64, 6, 3, 2, 1, 1, 1), {"ConvTranspose"}),
    "1 x 1": ((128, 128, 2, 1, 1, 1, 0, 1), {"Conv", "ConvTranspose"}),
    "1 x 1 by steps of 2": ((128, 128, 4, 1, 2, 1, 0, 1), {"ConvTranspose"}),
    "by steps beyond the kernel": ((128, 128, 6, 1, 3, 1, 0, 1), {"ConvTranspose"}),
    "dilated": ((64, 64, 7, 3, 2, 2, 2, 1), {"ConvTranspose"}),
    "a large kernel": ((64, 64, 2, 5, 1, 1, 2, 1), {"Conv", "ConvTranspose"}),
    "two filters a channel": ((64, 128, 4, 3, 1, 1, 1, 64), {"ConvTranspose"}),
}
# as above: how many Conv and ConvTranspose of the whole remain
SUMS = {
    "3 x 3": ((64, 64, 4, 3, 1, 1, 1, 64), 0),
    "5 x 5": ((64, 64, 2, 5, 1, 1, 2, 64), 0),
    "without padding": ((64, 64, 4, 3, 1, 1, 0, 64), 0),
    "dilated": ((64, 64, 4, 3, 1, 2, 2, 64), 0),
    "more padding than the kernel": ((64, 64, 2, 2, 1, 1, 1, 64), 0),
    "by steps of 2": ((64, 64, 4, 3, 2, 1, 1, 64), 1),
    "larger planes": ((64, 64, 5, 3, 1, 1, 1, 64), 2),
}  # fmt: skip
LEFT = {
    "larger planes": (64, 64, 5, 3, 1, 1, 1, 1),
    "a small weight": (16, 16, 2, 3, 1, 1, 1, 1),
    "a few groups": (64, 64, 2, 3, 1, 1, 1, 4),
}


def step(channels, filters, side, kernel, stride, dilation, padding, groups, batch="N"):
    """The loss of a scaled image's convolution, and both weights after a step."""
    specs = {
        "x": TensorSpec((batch, channels, side, side)),
        "first": TensorSpec((channels, 1, 1)),
        "w": TensorSpec((filters, channels // groups, kernel, kernel)),
    }

    def loss(x, first, w):
        y = ops.conv(x * first, w, stride=stride, dilation=dilation, padding=padding, groups=groups)
        return (y * y).sum()

    with (build := Build(TABLE, "loss")):
        made = build.finish({"loss": loss(*(build.param(k, s) for k, s in specs.items()))})
    made = value_and_grad(made, ["first", "w"], of="loss")
    with (build := Build(TABLE, "step")):
        params = [build.param(p.name, p.type) for p in made.params]
        named = dict(zip(made.result_names, inline(made, params), strict=True))
        new = {
            p.value.name: p - named[f"grad.{p.value.name}"] * 1e-3
            for p in params
            if p.value.name != "x"
        }
        return clean(build.finish({"loss": named["loss"], **new}))


def arrays(function, n=3):
    rng = np.random.default_rng(0)
    return [rng.normal(size=p.type.concrete({"N": n})).astype(np.float32) for p in function.params]


def changed(before, after):
    """Names of the operators that give another shape than before."""
    kinds = ("Conv", "ConvTranspose")
    shapes = [[(n.op.name, n.outputs[0].type) for n in f.nodes if n.op.name in kinds]
              for f in (before, after)]  # fmt: skip
    return {a[0] for a, b in zip(*shapes, strict=True) if a != b}


def check_same(function, merged):
    """Both give the same numbers, and so does the program that runs."""
    args = arrays(function)
    wanted = run_function(TABLE, function, args)
    program = engine("onnx").compile(function, donate=("first", "w"))
    for found in (run_function(TABLE, merged, args), program(*args)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", MERGED)
def test_a_batch_of_tiny_planes_becomes_one_and_nothing_else_changes(case):
    sizes, kinds = MERGED[case]
    function = step(*sizes)
    merged = merge_planes(function)
    assert changed(function, merged) == kinds
    check_same(function, merged)


@pytest.mark.parametrize("case", SUMS)
def test_kernels_of_single_channels_become_sums_of_rows(case):
    sizes, left = SUMS[case]
    function = step(*sizes)
    merged = merge_planes(function)
    assert sum(n.op.name in {"Conv", "ConvTranspose"} for n in merged.nodes) == left
    check_same(function, merged)


@pytest.mark.parametrize("case", LEFT)
def test_convolutions_that_gain_nothing_stay_as_they_are(case):
    function = step(*LEFT[case])
    assert merge_planes(function) is function


def test_a_single_image_stays_as_it_is():
    function = step(128, 128, 2, 3, 1, 1, 1, 1, batch=1)
    assert merge_planes(function) is function


def test_a_network_whose_weights_are_only_read_stays_as_it_is():
    build = Build(TABLE, "predict")
    with build:
        x = build.param("x", TensorSpec(("N", 128, 2, 2)))
        w = build.param("w", TensorSpec((128, 128, 3, 3)))
        function = build.finish({"y": ops.conv(x, w, padding=1)})
    assert merge_planes(function) is function


@pytest.mark.parametrize("case", ["3 x 3 over 2 x 2", "over 4 x 4"])
def test_a_batch_without_images_is_refused_before_it_runs(case):
    """onnxruntime fails on the first and never ends on the second, merged or not."""
    function = step(*MERGED[case][0])
    program = engine("onnx").compile(function, donate=("first", "w"))
    x, first, w = arrays(function, 0)
    loop = program.loop({"first": first, "w": w})
    for run in (lambda: program(x, first, w), lambda: loop.step(x=x)):
        with pytest.raises(InvalidInput, match=r"at least one sample, got x \(0, "):
            run()
    assert loop.step(x=np.ones((1, *x.shape[1:]), np.float32))["loss"] > 0


def test_any_number_of_images_runs_through_one_graph():
    function = step(128, 128, 2, 3, 1, 1, 1, 1)
    program = engine("onnx").compile(function, donate=("first", "w"))
    for n in (1, 2, 5):
        args = arrays(function, n)
        for a, b in zip(program(*args), run_function(TABLE, function, args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
