"""Operators of the user's own: a body in operators under a name, kept by that name.

A model holds the body, so any program that reads the model can run it; an ONNX model has it as a
local function. A kernel is code of this process that computes the same faster on one engine. It is
compared with the body on random operands before it is first used, and refused if it differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType, TypeMismatch
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpCall, OpKind, Table
from triplane.unified_ir.ops.rows.control.control import Pullback, VjpOf
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
DOMAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+){0,9}")
MAX_DOMAIN: Final = 200
TAKEN: Final = ("ai.onnx", "com.microsoft", "com.ms", "triplane", "org.pytorch")
"""Domains whose operators others define."""

CLOSE: Final = {"float16": 1e-2, "bfloat16": 1e-1}
"""How far a kernel may be from the body, relative and absolute; 1e-4 elsewhere."""

Kernel = Callable[..., Any]


def _check_name(name: str, domain: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInput(f"an operator's name is letters, digits and _, got {name[:120]!r}")
    if len(domain) > MAX_DOMAIN or not DOMAIN_NAME.fullmatch(domain):
        raise InvalidInput(
            f"an operator's domain is names joined by dots, such as 'org.example', got "
            f"{domain[:120]!r}"
        )
    if any(domain == d or domain.startswith(f"{d}.") for d in TAKEN):
        raise InvalidInput(f"the domain {domain!r} is others' to define; choose one of your own")


def is_own(name: str, domain: str) -> bool:
    """Whether an operator of this name may be defined outside this package."""
    try:
        _check_name(name, domain)
    except InvalidInput:
        return False
    return True


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"options of an operator are a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise InvalidInput(f"options of an operator are a JSON object, got {text[:120]!r}")
    return options


def _types(call: OpCall) -> tuple[TensorType, ...]:
    _check_name(call.attrs["name"], call.attrs["domain"])
    _options(call.attrs["options"])
    operands = [call.type(i) for i in range(len(call.types))]
    if len(call.regions) not in {1, 2}:
        raise InvalidInput(f"{call.row} has a body and perhaps a bprop, got {len(call.regions)}")
    body, *back = call.regions
    results = tuple(r.type for r in body.results)
    if [p.type for p in body.params] != operands or not results:
        raise TypeMismatch(f"{call.row} passes {operands} to {[p.type for p in body.params]}")
    if back:
        _check_bprop(back[0], operands, results)
    return results


def _check_bprop(
    back: Function, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> None:
    taken = [*operands, *results, *(t for t in results if t.dtype.is_float)]
    wanted = [t for t in operands if t.dtype.is_float]
    if [p.type for p in back.params] != taken or [r.type for r in back.results] != wanted:
        raise TypeMismatch(
            f"bprop takes {taken} and gives {wanted}, a cotangent per floating-point operand; got "
            f"{[p.type for p in back.params]} and {[r.type for r in back.results]}"
        )


def _kernel(
    *operands: Array, regions: Sequence[Kernel], name: str, domain: str, options: str
) -> tuple[Any, ...]:
    """The registered numpy kernel, else the body."""
    kernel = KERNELS.get((domain, name, "reference"))
    if kernel is None:
        return tuple(regions[0](*operands))
    options_of_call = _options(options)
    key = ("reference", domain, name, options, *((a.dtype, a.shape) for a in operands))
    if _CHECKED.get(key) is not kernel:
        rng = np.random.default_rng(0)
        drawn = [_like(rng, a.dtype, a.shape) for a in operands]
        outputs, wanted = _several(kernel(*drawn, **options_of_call)), regions[0](*drawn)
        _compare(f"{domain}.{name}", "reference", outputs, wanted)
        _note(key, kernel)
    return _several(kernel(*operands, **options_of_call))


def _several(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _like(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Operands that any body takes: numbers of order one, positions 0 and 1."""
    if np.dtype(dtype).kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _compare(name: str, engine: str, results: Sequence[Any], wanted: Sequence[Any]) -> None:
    for i, (a, b) in enumerate(zip(results, wanted, strict=False)):
        a, b = np.asarray(a), np.asarray(b)
        far = CLOSE.get(str(b.dtype), 1e-4)
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not np.allclose(
            a.astype(np.float64), b.astype(np.float64), rtol=far, atol=far, equal_nan=True
        ):
            shown = (
                f"largest difference {np.abs(a.astype(np.float64) - b).max():.3g}"
                if a.shape == b.shape
                else f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
            )
            raise InvalidInput(
                f"the {engine} kernel of {name} does not compute what its body does: result {i} on "
                f"random operands, {shown}; correct one of them"
            )
    if len(results) != len(wanted):
        raise InvalidInput(
            f"the {engine} kernel of {name} gives {len(results)} results, its body {len(wanted)}"
        )


def _vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    """With a bprop the operator stays one; without, its nodes are differentiated one by one."""
    body, *own = regions
    if own:
        ys: Sequence[Tensor] = recorder().apply(
            custom_row, inputs, attrs, regions=tuple(regions), outputs=outputs
        )
    else:
        ys = inline(body, list(inputs))
    wanted = [i for i, x in enumerate(inputs) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        if own:
            pairs = [(y, g) for y, g in zip(ys, gs, strict=True) if y.dtype.is_float]
            filled = [zeros(y.shape, y.dtype) if g is None else g for y, g in pairs]
            cotangents = inline(own[0], [*inputs, *ys, *filled])
        else:
            present = [i for i, g in enumerate(gs) if g is not None]
            back = vjp_of(body, wanted, present)
            cotangents = inline(back, [*inputs, *(g for g in gs if g is not None)])
        by_operand = dict(zip(wanted, cotangents, strict=True))
        return [by_operand.get(i) for i in range(len(inputs))]

    return ys, pullback


def _emit_custom(context: EmissionContext, node: Node) -> None:
    """A call of a local function that holds the body."""
    name, domain = str(node.attrs["name"]), str(node.attrs["domain"])
    called = context.local_function(name, domain, node.regions[0])
    context.add(called, context.inputs(node), context.output_names(node), domain=domain)


custom_row = Op(
    name="Custom",
    kind=OpKind.CONTROL,
    emit=_emit_custom,
    domain=DOMAIN,
    operands=("*",),
    attrs={
        "name": AttrSpec("STRING", required=True),
        "domain": AttrSpec("STRING", required=True),
        "options": AttrSpec("STRING", "{}"),
    },
    infer=_types,
    reference=_kernel,
    vjp_with_residuals=_vjp_with_residuals,
    inline_region=True,
)
"""regions: the body, then its own gradient if it has one; options: JSON for kernels."""

KERNELS: Final[dict[tuple[str, str, str], Kernel]] = {}
"""This process's kernels by (domain, name, engine); the newest definition of a name stands."""
_CHECKED: Final[dict[Any, Kernel]] = {}


MAX_CHECKED: Final = 10_000
"""Comparisons remembered; beyond, all are made again."""


def _note(key: Any, kernel: Kernel) -> None:
    if len(_CHECKED) >= MAX_CHECKED:
        _CHECKED.clear()
    _CHECKED[key] = kernel


@dataclass(frozen=True)
class CustomOp:
    """An operator that `custom` made; call it with tensors, and options by keyword."""

    name: str
    domain: str
    body: Callable[..., Any]
    bprop: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The result of the body: a tensor, or a tuple of them."""
        kept = _json(self.name, options)
        flat = [as_tensor(x) for x in inputs]
        body, value = region(
            self.name, [x.type for x in flat], lambda xs: self.body(*xs, **options)
        )
        with body:
            results = [body.as_operand(y) for y in _several(value)]
        functions = [self._closed(body, results)]
        if self.bprop is not None:
            functions.append(self._back(flat, results, options))
        outputs = recorder().apply(
            custom_row,
            flat,
            {"name": self.name, "domain": self.domain, "options": kept},
            regions=tuple(functions),
            outputs=len(results),
        )
        return tuple(outputs) if isinstance(value, (tuple, list)) else outputs[0]

    def _back(
        self, flat: Sequence[Tensor], results: Sequence[Tensor], options: Mapping[str, Any]
    ) -> Function:
        n, m = len(flat), len(results)
        floats = [y.type for y in results if y.dtype.is_float]

        def back(xs: list[Tensor]) -> list[Tensor]:
            ys, gs = xs[n : n + m], xs[n + m :]
            assert self.bprop is not None
            cotangents = _several(
                self.bprop(
                    *xs[:n], y=ys[0] if m == 1 else tuple(ys),
                    g=gs[0] if len(gs) == 1 else tuple(gs), **options,
                )
            )  # fmt: skip
            if len(cotangents) != n:
                raise InvalidInput(
                    f"bprop of {self.name} gives a cotangent per input ({n}), got "
                    f"{len(cotangents)}; give None where no gradient passes"
                )
            pairs = [(x, c) for x, c in zip(xs, cotangents, strict=False) if x.dtype.is_float]
            return [zeros(x.shape, x.dtype) if c is None else as_tensor(c) for x, c in pairs]

        types = [*(x.type for x in flat), *(y.type for y in results), *floats]
        return self._closed(*region(f"{self.name}.bprop", types, back))

    def _closed(self, build: Build, results: Sequence[Tensor]) -> Function:
        if build.captured:
            raise InvalidInput(
                f"the operator {self.name} takes everything it uses as an argument; it captures "
                f"{build.captured}"
            )
        return build.finish({f"y{i}": y for i, y in enumerate(results)})


def custom(
    name: str,
    *,
    domain: str,
    bprop: Callable[..., Any] | None = None,
    kernels: Mapping[str, Kernel] | None = None,
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Decorator: a function of tensors, written in operators, is an operator of that name.

    The body may take options by keyword: numbers, texts, lists of them. `bprop(*inputs, y=, g=,
    **options)` gives a cotangent per input. kernels: by engine; "reference" takes and gives numpy
    arrays, "onnx" and "ascend" are other bodies in operators. Each takes the options, with the
    body's defaults.

    >>> import numpy as np
    >>> from triplane.unified_ir import graph, ops
    >>> @ops.custom("Swoosh", domain="org.example")
    ... def swoosh(x, *, slope=0.1):
    ...     return ops.softplus(x) - slope * x
    >>> graph(lambda x: swoosh(x, slope=0.5))(np.float32(0.0)).round(3)
    np.float32(0.693)
    """
    _check_name(name, domain)

    def decorate(body: Callable[..., Any]) -> CustomOp:
        for engine, kernel in (kernels or {}).items():
            KERNELS[domain, name, engine] = kernel
        return CustomOp(name, domain, body, bprop)

    return decorate


def _json(name: str, options: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(sorted(options.items())))
    except TypeError as error:
        raise InvalidInput(
            f"options of {name} are numbers, texts and lists of them: {error}; give tensors "
            "without keyword"
        ) from error


def with_kernels(table: Table, function: Function, engine: str) -> Function:
    """The function with this process's kernels for `engine` as the bodies of its operators."""
    if not any(e == engine for _, _, e in KERNELS):
        return function
    nodes = tuple(_replaced(table, node, engine) for node in function.nodes)
    return function.with_(nodes=nodes)


def _replaced(table: Table, node: Node, engine: str) -> Node:
    regions = tuple(with_kernels(table, r, engine) for r in node.regions)
    if (node.op.domain, node.op.name) == (DOMAIN, custom_row.name):
        name, domain = str(node.attrs["name"]), str(node.attrs["domain"])
        kernel = KERNELS.get((domain, name, engine))
        if kernel is not None:
            body = _recorded(table, node, kernel)
            _hold(table, body, node.regions[0], (engine, f"{domain}.{name}", kernel))
            regions = (body, *regions[1:])
    return Node(node.op, node.inputs, node.outputs, node.attrs, regions, node.meta)


def _recorded(table: Table, node: Node, kernel: Kernel) -> Function:
    body = node.regions[0]
    options = _options(str(node.attrs.get("options", "{}")))
    build = Build(table, body.name)
    with build:
        results = _several(kernel(*(build.param(p.name, p.type) for p in body.params), **options))
    return build.finish({f"y{i}": y for i, y in enumerate(results)})


def _hold(
    table: Table, replacement: Function, body: Function, what: tuple[str, str, Kernel]
) -> None:
    """Refuses a kernel that differs from the body."""
    engine, name, kernel = what
    types = [[str(v.type) for v in f.results] for f in (replacement, body)]
    if types[0] != types[1]:
        raise InvalidInput(f"the {engine} kernel of {name} gives {types[0]}, its body {types[1]}")
    key = (engine, name, *(str(p.type) for p in body.params), *types[0])
    if _CHECKED.get(key) is kernel:
        return
    symbols = sorted(set().union(*(p.type.symbols for p in body.params)))
    sizes = {s: 3 + i for i, s in enumerate(symbols)}
    rng = np.random.default_rng(0)
    drawn = [
        _like(rng, p.type.dtype.numpy, [evaluate(d, sizes) for d in p.type.shape])
        for p in body.params
    ]
    _compare(
        name, engine, run_function(table, replacement, drawn), run_function(table, body, drawn)
    )
    _note(key, kernel)
