# mypy: disable-error-code="assignment,arg-type,operator"
"""A node that fails at run time is named with the user's line and what it met, on every engine."""

import re

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, mode, nn, ops, trace
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.table import TABLE

F32 = np.float32
X, I = np.arange(3, dtype=F32), np.array([1, 7])


def gathers(x, i):
    x = ops.tanh(x)
    return ops.gather(x, i) * 2.0


def divides(x, i):
    return x[0] + (TABLE["", "Div"](i, i - 7)).cast("float32")


def in_a_branch(x, i):
    return ops.gather(x, i) if x.sum() > 0.0 else x[:2]


def in_a_loop(x, i):
    total = x[0]
    for k in i:
        total = total + ops.gather(x, k)
    return total


def scatters(x, i):
    y = ops.exp(x)
    return ops.scatter_nd(y, ops.unsqueeze(i, 1), y[:2])


PROGRAMS = {  # function: (operator, lines below its first, what is shown)
    gathers: ("Gather", 2, r"float32\[3\] \[0\.\s*, .*int64\[2\] \[1, 7\]"),
    divides: ("Div", 1, r"int64\[2\] \[1, 7\], int64\[2\] \[-6,\s+0\]"),
    in_a_branch: ("Gather", 1, ""),
    in_a_loop: ("Gather", 3, ""),
    scatters: ("ScatterND", 2, r"int64\[2, 1\] \[\[1\],\s*\[7\]\]"),
}


def name_of(f):
    return getattr(f, "__name__", "")


CASES = [(f, *rest) for f, rest in PROGRAMS.items()]


def expected(f, op, below, shown):
    line = f.__code__.co_firstlineno + below
    return rf"failed on these values: {op} \(at \S*test_failing.py:{line}\): .*{shown}"


def traced(f):
    return trace(graph(f), TensorSpec((3,)), TensorSpec((2,), "int64"))


@pytest.mark.parametrize("name", ["onnx", "reference", "ascend"])
@pytest.mark.parametrize(
    ("f", "op", "below", "shown"), CASES, ids=lambda f: getattr(f, "__name__", "")
)
def test_the_node_the_line_and_the_operands_are_named(name, f, op, below, shown):
    program = engine(name).compile(traced(f))
    with pytest.raises(InvalidInput, match=expected(f, op, below, shown)):
        program(X, I)


@pytest.mark.parametrize("name", ["onnx", "reference", "ascend"])
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[0, 3], [7, 9]], r"index 7 at \[1, 0\] .* the largest is 9, so 10 are needed"),
        ([[0, -6], [1, 1]], r"index -6 at \[0, 1\] .* 5 rows, 0 to 4 \(of an"),
    ],
)  # fmt: skip
def test_an_embedding_says_how_many_rows_it_needs(name, ids, says):
    table = np.zeros((5, 2), F32)
    function = trace(graph(ops.embedding), TensorSpec((5, 2)),
                     TensorSpec((2, 2), "int64"))  # fmt: skip
    with pytest.raises(InvalidInput, match=says):
        engine(name).compile(function)(table, np.array(ids))
    with pytest.raises(InvalidInput, match=says):
        nn.Embedding(5, 2)(np.array(ids))


@pytest.mark.parametrize("opset", [17, 26])
def test_the_place_is_found_in_the_emission_that_ran(opset):
    program = OnnxEngine(target=OnnxTarget(opset)).compile(traced(gathers))
    with pytest.raises(InvalidInput, match=expected(gathers, *PROGRAMS[gathers])):
        program(X, I)


def test_eager_mode_says_the_same():
    with mode("eager"), pytest.raises(InvalidInput, match=expected(gathers, *PROGRAMS[gathers])):
        graph(gathers)(X, I)


def test_a_backward_node_is_named_by_the_line_of_its_forward_node():
    def loss(x, i):
        return ops.gather_elements(x, i).sum()

    slope = trace(grad(loss), TensorSpec((3,)), TensorSpec((2,), "int64"))
    line = loss.__code__.co_firstlineno + 1
    for name in ("onnx", "reference"):
        with pytest.raises(InvalidInput, match=rf"\(at \S*test_failing.py:{line}\) in grad"):
            engine(name).compile(slope)(X, I)


class Table(nn.Cell):
    def __init__(self):
        super().__init__()
        self.seen = nn.Buffer(np.zeros((), F32))
        self.rows = nn.Embedding(4, 2)

    def construct(self, ids):
        self.seen = self.seen + 1.0
        return ops.layer_norm(self.rows(ids), np.ones(2, F32), np.zeros(2, F32))


def test_a_cell_is_named_with_the_line_of_its_node_and_keeps_its_state():
    net = Table()
    with pytest.raises(InvalidInput, match=r"Gather \(at \S*:\d+\) in rows: .*int64\[2\] \[1, 7\]"):
        net(I)
    assert float(net.seen.array) == 0


def test_a_failed_step_of_a_loop_is_named_and_moves_nothing():
    def step(w, i):
        return {"w": w + 1.0, "y": ops.gather(w, i)}

    function = trace(step, TensorSpec((3,)), TensorSpec((1,), "int64"))
    for name in ("onnx", "reference"):
        loop = engine(name).compile(function, donate=("w",)).loop({"w": X})
        loop.step(i=np.array([0]))
        with pytest.raises(InvalidInput, match=r"Gather \(at \S*test_failing.py:\d+\)"):
            loop.step(i=np.array([3]))
        np.testing.assert_array_equal(loop.state()["w"], X + 1)


def test_sizes_that_disagree_are_named_before_anything_runs():
    function = trace(lambda a, b: a + b, TensorSpec(("N",)), TensorSpec(("N",)))
    for name in ("onnx", "reference"):
        with pytest.raises(InvalidInput, match=r"\bN\b|\bb\b") as caught:
            engine(name).compile(function)(np.ones(3, F32), np.ones(4, F32))
        assert re.search(r"[34]", str(caught.value))


def test_onnxruntimes_own_source_is_no_part_of_the_message():
    function = trace(lambda xs: ops.scan(lambda c, x: (c + x, x), 0.0, xs)[0], TensorSpec(("N",)))
    line = test_onnxruntimes_own_source_is_no_part_of_the_message.__code__.co_firstlineno + 1
    with pytest.raises(InvalidInput, match=rf"Scan \(at \S*:{line}\): (?!/)") as caught:
        engine("onnx").compile(function)(np.zeros(0, F32))
    assert ".cc" not in str(caught.value)
