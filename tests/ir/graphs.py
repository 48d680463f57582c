"""Functions and modules the tests of the IR share; every one is built by the program itself."""

import numpy as np
import pytest
from tests.conformance.uses import is_constant

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.ir.graph import AttrValue, Function, Location, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import DTYPES, OptionalType, SequenceType, TensorSpec, type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE

PARTS_OF_ROWS = [
    *(pytest.param(row, row.samples[:1], id=str(row)) for row in TABLE.values()),
    *(
        pytest.param(row, row.samples[1:], id=f"{row}-others", marks=pytest.mark.long)
        for row in TABLE.values()
        if len(row.samples) > 1
    ),
]
"""Each row with its first sample, and in the long run with its others."""


def of_sample(row, sample, dtype=np.float32):
    """A function of one node of `row`, and its arguments."""
    arrays = [
        None if a is None else a.astype(dtype) if a.dtype == np.float64 else a
        for a in sample.arrays()
    ]
    build, args = Build(TABLE, "sample"), []
    with build:
        inputs = []
        for i, (array, make) in enumerate(zip(arrays, sample.inputs, strict=True)):
            if array is None or is_constant(make, array):
                inputs.append(array)
            else:
                inputs.append(build.param(f"x{i}", type_of(array)))
                args.append(array)
        made = build.apply(row, inputs, sample.attrs, outputs=sample.outputs)
    return build.finish({f"y{i}": y for i, y in enumerate(made)}), args


def scalar(function):
    """The sum of all floating-point results, and whether there is one."""
    build = Build(TABLE, function.name)
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        found = [y for y in inline(function, params) if y.dtype.is_float]
        if not found or not any(p.type.dtype.is_float for p in function.params):
            return None
        total = found[0].cast("float32").sum()
        for y in found[1:]:
            total = total + y.cast("float32").sum()
    return build.finish({"loss": total})


def built(f, **types):
    """`f` as a function with one result `loss`."""
    build = Build(TABLE, "f")
    with build:
        made = f(**{k: build.param(k, t) for k, t in types.items()})
    return build.finish({"loss": made})


def _scan(h, xs, w):
    def cell(h, x):
        h = ops.tanh(h @ w + x)
        return h, h * h

    after, ys = ops.scan(cell, h, xs, reverse=True)
    return after.sum() + ys.sum()


def _nested(x, w):
    def body(i, c):
        return ops.cond(i == 1, lambda c: ops.tanh(c @ w), lambda c: c * c, c)

    return ops.fori_loop(3, body, x).sum()


def _while(x, w):
    y, _ = ops.while_loop(
        lambda c: c[1] < 3.0,
        lambda c: (ops.sin(c[0] @ w), c[1] + 1.0),
        (x, ops.constant(np.float32(0))),
    )
    return (y * y).sum()


def _custom(x, w):
    def back(x, w, y, g):
        return g @ w.transpose(), x.transpose() @ g

    return ops.custom_gradient(lambda x, w: x @ w, back, x, w).sum()


_XW = {"x": TensorSpec((2, 3)), "w": TensorSpec((3, 3))}
WITH_REGIONS = {
    "scan": lambda: built(_scan, h=TensorSpec((3,)), xs=TensorSpec(("T", 3)), w=TensorSpec((3, 3))),
    "nested": lambda: built(_nested, **_XW),
    "while": lambda: built(_while, **_XW),
    "custom": lambda: built(_custom, **_XW),
}


def with_gradients(name):
    """A function with regions, its gradient, and the gradient of its gradient's square."""
    first = WITH_REGIONS[name]()
    second = value_and_grad(first)
    build = Build(TABLE, "square")
    with build:
        params = [build.param(p.name, p.type) for p in second.params]
        grads = inline(second, params)[1:]
        total = (grads[0] * grads[0]).sum()
    return [first, second, value_and_grad(build.finish({"loss": total}))]


def arguments(function, seed=0, **sizes):
    """Arguments of the function's types, T and N being 4 unless said."""
    rng = np.random.default_rng(seed)
    found = []
    for p in function.params:
        shape = p.type.concrete({"T": 4, "N": 4, **sizes})
        drawn = rng.standard_normal(shape) * 0.5
        found.append(np.asarray(drawn * (1 if p.type.dtype.is_float else 4), p.type.dtype.numpy))
    return found


STATE: dict[str, tuple[Role, np.ndarray]] = {
    "w": (Role.PARAMETER, np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)),
    "user.head": (Role.PERSONAL, np.full(3, 7.5, np.float32)),
    "steps": (Role.BUFFER, np.array(5, np.int64)),
    "w.momentum": (Role.OPTIMIZER, np.full((4, 3), 0.25, np.float32)),
    "key": (Role.KEY, np.array([1, 2], np.uint32)),
}


def module(big=400):
    """Two entries over one state of every role; a constant of `big` floats."""
    state = {name: StateTensor(role, array) for name, (role, array) in STATE.items()}
    predict = Build(TABLE, "predict")
    with predict:
        x = predict.param("x", TensorSpec(("N", 4)))
        w, head = (predict.param(k, state[k].type) for k in ("w", "user.head"))
        table = ops.constant(np.arange(big, dtype=np.float32))
        y = ops.relu(x @ w) * head + table[:3]
    step = Build(TABLE, "step")
    with step:
        x = step.param("x", TensorSpec(("N", 4)))
        held = {k: step.param(k, state[k].type) for k in ("w", "w.momentum", "steps", "key")}
        noise = ops.random_uniform(held["key"], x.shape)
        momentum = held["w.momentum"] * 0.9 + (x + noise).sum([0]).reshape(4, 1)
        results = {
            "loss": momentum.sum(),
            "w": held["w"] - momentum * 0.01,
            "w.momentum": momentum,
            "steps": held["steps"] + 1,
            "key": ops.next_key(held["key"]),
        }
    return Module(
        {"predict": predict.finish({"y": y}), "step": step.finish(results)},
        {"predict": "predict", "train_step": "step"},
        state,
        {"classes": "a\nb\nc", "cell": "tests"},
    )


def held():
    """Sequences, an optional, strings, and sizes that only the data decide."""
    build = Build(TABLE, "held")
    with build:
        x = build.param("x", TensorSpec(("N", 2)))
        rows = build.param("rows", SequenceType(TensorSpec(("_", 2))))
        words = build.param("words", TensorSpec((2,), "string"))
        maybe = ops.optional(OptionalType(rows.type).element)
        grown = ops.fori_loop(3, lambda _, s: ops.sequence_insert(s, x), rows)
        parts = ops.sequence_map(lambda p: p @ np.ones((2, 1), np.float32), grown)
        either = ops.cond(x.sum() > 0.0, lambda x: x[:1], lambda x: ops.concat([x, x]), x)
        texts = TABLE["", "StringConcat"](words, np.array(["a", "bc"], object))
        results = [maybe, ops.concat_from_sequence(parts), either, texts]
    return build.finish({f"y{i}": r for i, r in enumerate(results)})


SMALL = """\
ops MaxPool@22 triplane.Any@1
function predict(
  %x: float32[N,1,8,8],
  %"odd name": int64[]
) -> (y: float32[N,1,4,4], "the \\"rest\\"": bool[2]) {
  %2: float32[N,1,4,4], %3: bool[2] = MaxPool(%x, none) \
{kernel_shape=(2, 2), strides=(2,)}  # digits.py:12 conv
  %4: bool[2] = triplane.Any(%3, %"odd name") \
{a=1, b=-0.5, c="t\\n", d=("u",), e=(N, 3), f=bool[2] {true, false}, g=float16}
  return %2, %4
}"""


def small():
    x = Value(TensorSpec(("N", 1, 8, 8)), "x")
    odd = Value(TensorSpec((), "int64"), "odd name")
    y, m, r = (
        Value(t)
        for t in (TensorSpec(("N", 1, 4, 4)), TensorSpec((2,), "bool"), TensorSpec((2,), "bool"))
    )
    attrs = {"strides": (2,), "kernel_shape": (2, 2)}
    place = Meta(Location("digits.py", 12), "conv")
    pool = Node(OpId("", "MaxPool", 22), (x, None), (y, m), attrs, (), place)
    kinds: dict[str, AttrValue] = {
        "a": 1,
        "b": -0.5,
        "c": "t\n",
        "d": ("u",),
        "e": TensorSpec(("N", 3)).shape,
        "f": np.array([True, False]),
        "g": DTYPES["float16"],
    }
    rest = Node(OpId("triplane", "Any", 1), (m, odd), (r,), kinds)
    return Function("predict", (x, odd), (y, r), ("y", 'the "rest"'), (pool, rest))


def split():
    """A product and a sum with strategies."""
    build = Build(TABLE, "split")
    with build:
        x, w = (build.param(n, TensorSpec(s)) for n, s in (("x", ("N", 4)), ("w", (4, 6))))
        y = ops.matmul.shard((4, 1), (1, 2))(x, w)
        total = ops.clip.shard((2, 3))(y)
    return build.finish({"y": total})
