# mypy: disable-error-code="call-arg,misc,arg-type"
"""Rows are called by the signature that help, completion and type checkers show."""

import inspect
import os
import pydoc
import re
import textwrap
from itertools import groupby
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
from mypy import api

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import graph, ops
from triplane.unified_ir.ops import signatures
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.table import TABLE

ROOT = Path(__file__).parents[2]
STUB = ROOT / "unified_ir" / "ops" / "__init__.pyi"
X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
KEY = np.array([0, 7], np.uint32)

HEAD = '''"""Types of the operators; generated from the table, see tests/ops/test_signatures.py."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType
from triplane.unified_ir.ops.tensor import Axes, HasTensor, TensorLike

_Operand = Tensor | Array | np.generic | HasTensor
_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)

class _Operator(Protocol[_P, _R]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def shard(self, *strategy: Sequence[int]) -> Callable[_P, _R]: ...

def _operator(function: Callable[_P, _R]) -> _Operator[_P, _R]: ...

'''
KNOWN = {
    *("Any", "Array", "Axes", "DType", "Dim", "Literal", "Sequence", "Tensor", "TensorLike"),
    *("bool", "float", "int", "None", "str", "tuple"),
}
OPERANDS = {"Tensor": "_Operand", "Tensor | None": "_Operand | None"}
"""Annotations of operands, which may be arrays and parameters as well."""


def takes_tensors(value):
    """Whether a function takes tensors: no sequences, and no functions that compute with them."""
    parts = {"control", "data"}
    if not isinstance(value, FunctionType) or not parts.isdisjoint(value.__module__.split(".")):
        return False
    words = " ".join(str(p.annotation) for p in inspect.signature(value).parameters.values())
    return "Tensor" in words


def imported(names, hidden=""):
    """Imports of everything that is not a row, from the module that defines it."""
    by_module = sorted((getattr(ops, n).__module__, n) for n in names)
    for module, group in groupby(by_module, key=lambda pair: pair[0]):
        for _, name in group:
            yield f"from {module} import {name} as {hidden}{name}"


def of_function(name, function):
    """The definition of a function that takes arrays as operands; None for any other function."""
    signature = inspect.signature(function)
    annotations = [p.annotation for p in signature.parameters.values()]
    if OPERANDS.keys().isdisjoint(annotations):
        return None
    words = re.sub('"[^"]*"', "", " ".join([*annotations, signature.return_annotation]))
    if not set(re.findall(r"\w+", words)) <= KNOWN:
        return None
    parameters = [
        p.replace(
            annotation=Text(OPERANDS.get(p.annotation, p.annotation)),
            default=p.default if p.default is p.empty else Text(shown(p.default)),
        )
        for p in signature.parameters.values()
    ]
    result = Text(signature.return_annotation)
    return f"def {name}{signature.replace(parameters=parameters, return_annotation=result)}: ..."


class Text(str):
    """Source text, which a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def shown(default):
    return repr(default) if isinstance(default, (bool, int, float, str, type(None))) else "..."


def wrapped(line):
    """A definition, with one parameter a line where one line is too long."""
    if len(line) <= 100:
        return line
    head, _, rest = line.partition("(")
    parameters, _, tail = rest.rpartition(")")
    lines = "".join(f"    {p},\n" for p in parameters.split(", "))
    return f"{head}(\n{lines}){tail}"


def text():
    names: list[str] = vars(ops)["__all__"]
    lines = {}
    for name in sorted(names):
        value = getattr(ops, name)
        if isinstance(value, Op):
            lines[name] = wrapped(signatures.stub(name, value))
        elif isinstance(value, FunctionType) and (line := of_function(name, value)):
            lines[name] = wrapped(line)
    others = [n for n in names if n not in lines]
    split = [n for n in others if takes_tensors(getattr(ops, n))]
    imports = imported([n for n in others if n not in split])
    imports = [*imports, *imported(split, hidden="_")]
    lines |= {n: f"{n} = _operator(_{n})" for n in split}
    definitions = [
        f"@_operator\n{line}" if line.startswith("def ") else line for line in lines.values()
    ]
    return HEAD + "\n".join([*imports, "", *definitions]) + "\n"


def test_the_type_stub_is_the_table():
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        STUB.write_text(text())
    assert STUB.read_text() == text(), "run this test with TRIPLANE_ACCEPT=1"


@pytest.mark.parametrize("row", TABLE.values(), ids=str)
def test_every_sample_of_a_row_fits_its_signature(row):
    signature = inspect.signature(row)
    for sample in row.samples:
        signature.bind(*sample.inputs, **sample.attrs)


@pytest.mark.parametrize("row", TABLE.values(), ids=str)
def test_defaults_in_a_signature_are_those_of_the_row(row):
    for name in signatures.attributes_of(row):
        default = inspect.signature(row).parameters[name].default
        spec = row.attr_specs[name]
        assert (default is inspect.Parameter.empty) == spec.required
        if isinstance(spec.default, float):
            assert np.float32(default) == np.float32(spec.default)
        elif not spec.required:
            assert default == spec.default


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softmax", "(x, /, axis=-1)"),
        ("leaky_relu", "(x, /, alpha=0.01)"),
        ("clip", "(x, min=None, max=None, /)"),
        ("maximum", "(*data)"),
        ("where", "(condition, x, y, /)"),
        ("bit_shift", "(x, y, /, direction)"),
        ("stft", "(signal, frame_step, window=None, frame_length=None, /, *, onesided=1)"),
        ("stop_gradient", "(x, /)"),
    ],
)
def test_signatures(name, expected):
    assert str(inspect.signature(getattr(ops, name))) == expected
    assert expected in repr(getattr(ops, name))


def test_help_shows_how_an_operator_is_called_and_what_it_computes():
    page = pydoc.plain(pydoc.render_doc(ops.softmax))
    assert "Softmax(x, /, axis=-1)" in page
    assert "normalized exponential" in page
    assert "triplane.StopGradient(x, /)" in pydoc.render_doc(ops.stop_gradient)


def test_the_only_attribute_may_follow_the_operands():
    for call in (lambda x: ops.softmax(x, 0), lambda x: ops.softmax(x, axis=0)):
        np.testing.assert_allclose(graph(call)(X).sum(axis=0), np.ones(3), rtol=1e-6)
    assert graph(lambda x: ops.transpose(x, (1, 0)))(X).shape == (3, 2)
    assert graph(lambda x: ops.gather(x, np.array([1]), 1))(X).shape == (2, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.softmax(x, 1, 2), r"takes 1 operand, got 3: Softmax\(x, /, axis=-1\) \(at"),
        (lambda x: ops.softmax(x, 1, axis=1), r"takes 1 operand, got 2: Softmax\("),
        (lambda x: ops.relu(x, 1), r"Relu takes 1 operand, got 2: Relu\(x, /\) \(at .*signatures"),
        (lambda x: ops.clip(x, 1, 2, 3), r"takes 1 to 3 operands, got 4: Clip\(x, min=None, max="),
        (lambda x: ops.gemm(x, x.T, x, 0.5), r"takes 2 to 3 operands, got 4: .* \*, alpha=1.0"),
        (lambda _: ops.maximum(), r"takes at least 1 operand, got 0: Max\(\*data\)"),
        (
            lambda x: ops.clip(x, min=0),
            r"min is an operand of Clip, .* by position: Clip\(x, min=N",
        ),
        (lambda x: ops.reshape(x, 1.5), r"a shape is one or several whole numbers, got 1\.5"),
        (lambda _: ops.zeros((2, 0.5)), r"whole numbers, got \(2, 0\.5\)"),
        (lambda _: ops.fold_in(KEY, 1.5), r"a whole number in 0\.\.2\^32-1, got 1\.5"),
        (lambda _: ops.fold_in(KEY, 2**32), r"a whole number in 0\.\.2\^32-1, got 4294967296"),
        (lambda x: ops.softmax(x, "rows"), r"Softmax.axis must be of kind INT, got 'rows'"),
    ],
)
def test_a_call_that_does_not_fit_shows_the_signature(call, message):
    with pytest.raises(InvalidInput, match=message):
        graph(call)(X)


def test_one_number_is_the_shape_of_a_vector():
    @graph
    def vectors(x, key):
        drawn = ops.random_normal(key, 3), ops.random_uniform(key, 3), ops.random_bits(key, 3)
        return (ops.reshape(x, -1), ops.zeros(3), ops.ones(3), ops.expand(x[0, 0], 3), *drawn)

    flat, *others = vectors(X, KEY)
    np.testing.assert_array_equal(flat, X.reshape(-1))
    assert [y.shape for y in others] == [(3,)] * 6


USES = """
    from typing import Any

    import numpy as np
    from triplane.unified_ir import graph, nn, ops, optim, value_and_grad

    class Net(nn.Cell):
        key: nn.State

        def __init__(self) -> None:
            super().__init__()
            self.key = nn.RandomKey(np.array([0, 7], np.uint32))
            self.scale = nn.Parameter(np.ones(3, np.float32))

        def construct(self, x: ops.Tensor) -> ops.Tensor:
            x = x + ops.random_normal(self.key, x.shape)
            self.key = ops.next_key(self.key)
            x = ops.matmul(x, self.scale) * ops.vector_norm(self.scale) + ops.mean(np.ones(3))
            x = ops.add.shard((4, 1), (4, 1))(x, x)
            y = ops.where(x > 0.0, ops.softmax(x, 1), ops.leaky_relu(x, alpha=0.1))
            return ops.clip(ops.maximum(y, x, 0.5), None, np.float32(1.0) * np.ones(1)) + ops.exp(x)

    OPTIMIZER = optim.Adam(1e-3)

    @graph
    def step(net: Net, state: dict[str, Any], x: ops.Tensor) -> Any:
        value, grads = value_and_grad(lambda n, x: n(x).sum())(net, x)
        net, state = OPTIMIZER.update(net, grads, state)
        return value, nn.functional_call(net, net.trainable_state(), x), state
"""
MISUSES = {
    "ops.softmax(x, axi=1)": 'Unexpected keyword argument "axi" for "__call__"',
    "ops.softmax(x, 'rows')": 'Argument 2 to "__call__" of "_Operator" has incompatible type "str"',
    "ops.relu(x, 1)": 'Too many positional arguments for "__ca|Too many arguments for "__call__"',
    "ops.bit_shift(x, x)": 'Missing positional argument "direction" in call to "__call__"',
    "ops.relu.shard(2)(x)": 'Argument 1 to "shard" of "_Operator" has incompatible type "int"',
    "ops.sofmax(x)": 'has no attribute "sofmax"',
}


@pytest.mark.long
def test_a_type_checker_knows_the_operators(tmp_path):
    program = tmp_path / "program.py"
    lines = [f"    {call}" for call in MISUSES]
    program.write_text(
        textwrap.dedent(USES) + "\ndef misused(x: ops.Tensor) -> None:\n" + "\n".join(lines) + "\n"
    )
    out, _, _ = api.run(
        ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(program)]
    )
    reported = [line for line in out.splitlines() if "error:" in line]
    assert len(reported) == len(MISUSES), out
    for line, message in zip(reported, MISUSES.values(), strict=True):
        assert any(m in line for m in message.split("|")), line
