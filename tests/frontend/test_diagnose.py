# mypy: disable-error-code="operator,assignment"
"""The node that makes a NaN, and what stops a gradient: by operator, line and cell."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import graph, mode, nn, ops, optim, train
from triplane.unified_ir.frontend.diagnose import first_nonfinite, zero_gradients

from .sides import floats

X = floats(1.0, -2.0, 4.0)


def line_of(f, below):
    return rf"\S*test_diagnose.py:{f.__code__.co_firstlineno + below}"


def logs(x):
    y = x * 2.0
    z = ops.log(y)
    return z.sum()


def logs_in_a_loop(x):
    total = 0.0
    for v in x:
        total = total + ops.log(v)
    return total


def logs_in_a_branch(x):
    return ops.sqrt(x).sum() if x.sum() > 0.0 else x.sum()


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (logs, rf"Log at {line_of(logs, 2)} makes float32\[3\] in .* 1 of 3 not finite of float32"),
        (logs_in_a_loop, rf"Log at {line_of(logs_in_a_loop, 3)} makes float32\[\]"),
        (logs_in_a_branch, rf"Sqrt at {line_of(logs_in_a_branch, 1)} makes float32\[3\]"),
    ],
    ids=["node", "loop", "branch"],
)
def test_the_first_node_that_makes_a_nan_is_named(f, text):
    import re

    assert re.match(text, first_nonfinite(graph(f), X))
    assert first_nonfinite(graph(f), np.abs(X)) == ""
    for how in ("graph", "eager"):
        with mode(how, finite=True):
            with pytest.raises(InvalidInput, match=f"NaN or infinity: {text}"):
                graph(f)(X)
            graph(f)(np.abs(X))


def test_an_argument_that_is_not_finite_is_named_first():
    assert first_nonfinite(logs, floats(np.nan)).startswith("'x' holds float32[1]")


class Counting(nn.Cell):
    def __init__(self):
        super().__init__()
        self.seen = nn.Buffer(np.zeros((), np.float32))

    def construct(self, x):
        self.seen = self.seen + 1.0
        return ops.log(x)


def test_a_refused_call_writes_no_buffer_back():
    cell = Counting()
    with mode("graph", finite=True), pytest.raises(InvalidInput, match="Log at"):
        cell(X)
    assert float(cell.seen.array) == 0


def counts(x, unread):
    above = (x > 0.0).cast("float32")
    whole = x.cast("int64").cast("float32")
    return (above * whole).sum() + ops.stop_gradient(x).sum()


def test_what_stops_a_gradient_is_named_with_its_line():
    found = zero_gradients(counts, X, X)
    x, unread = (str(z) for z in found)
    for op, below in (("Greater", 1), ("Cast to int64", 2), ("triplane.StopGradient", 3)):
        where = f"test_diagnose.py:{counts.__code__.co_firstlineno + below}"
        assert f"{op} (at tests/frontend/{where})" in x
    assert unread == (
        "the gradient of 'y' for 'unread' is zero by construction: nothing that 'y' is "
        "computed from reads it"
    )


def test_a_gradient_that_some_path_carries_is_not_zero():
    assert zero_gradients(lambda x: (x.cast("int64").cast("float32") * x).sum(), X) == []
    assert zero_gradients(graph(logs_in_a_loop), X) == []
    assert zero_gradients(graph(logs_in_a_branch), X) == []


class Rounds(nn.Cell):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(np.ones((), np.float32))
        self.weight = nn.Parameter(np.ones((2, 1), np.float32))

    def construct(self, x):
        return x @ self.weight * ops.round_(self.scale)


def test_a_trainer_says_what_stops_a_parameters_gradient():
    trainer = train.Trainer(Rounds(), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    data = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    line = Rounds.construct.__code__.co_firstlineno + 1
    with pytest.raises(InvalidInput, match=rf"'scale'.*Round \(at \S*test_diagnose.py:{line}\)"):
        trainer.fit(data, epochs=1)


def test_zero_gradients_of_a_cell_ask_about_what_is_trained():
    assert [z.parameter for z in zero_gradients(Rounds(), np.ones((1, 2), np.float32))] == ["scale"]
