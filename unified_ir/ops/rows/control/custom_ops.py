"""User-defined operators: a body written in operators, which keeps its name in the graph.

A model holds the body, so any program that reads the model can run it; an ONNX model has it as a
local function. A kernel is code of this process that computes the same faster on one engine. It is
compared with the body on random operands before it is first used, and refused if it differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function, Node
from triplane.unified_ir.ir.types import TensorType, TypeMismatch
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpCall, OpKind, Table
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.control.control import Pullback, VjpOf
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
DOMAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+){0,9}")
MAX_DOMAIN: Final = 200
TAKEN: Final = ("ai.onnx", "com.microsoft", "com.ms", "triplane", "org.pytorch")
"""Domains that users cannot define operators in, because others do."""

CLOSE: Final = {"float16": 1e-2, "bfloat16": 1e-1}
"""How far a kernel may be from the body, relative and absolute; 1e-4 elsewhere."""

Kernel = Callable[..., Any]


def _check_name(name: str, domain: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInput(f"an operator's name has letters, digits and _, got {name[:120]!r}")
    if len(domain) > MAX_DOMAIN or not DOMAIN_NAME.fullmatch(domain):
        raise InvalidInput(
            f"an operator's domain consists of names joined by dots, such as 'org.example', got "
            f"{domain[:120]!r}"
        )
    if any(domain == d or domain.startswith(f"{d}.") for d in TAKEN):
        raise InvalidInput(f"the domain {domain!r} is reserved; choose one of your own")


def is_own(name: str, domain: str) -> bool:
    """Return whether an operator of this name may be defined outside this package."""
    try:
        _check_name(name, domain)
    except InvalidInput:
        return False
    return True


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"options of an operator must be a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise InvalidInput(f"options of an operator must be a JSON object, got {text[:120]!r}")
    return options


def _types(call: OpCall) -> tuple[TensorType, ...]:
    _check_name(call.attrs["name"], call.attrs["domain"])
    _options(call.attrs["options"])
    if len(call.regions) not in {1, 2}:
        raise InvalidInput(
            f"{call.row} has a body and at most one bprop, got {len(call.regions)} regions"
        )
    results = control.region_results(call, 0, control.all_types(call))
    if not results:
        raise TypeMismatch(f"{call.row} needs a body that returns something")
    if len(call.regions) > 1:
        control.check_bprop(call, results)
    return results


def _kernel(
    *operands: Array, regions: Sequence[Kernel], name: str, domain: str, options: str
) -> tuple[Any, ...]:
    """Run the registered numpy kernel, or else the body."""
    kernel = KERNELS.get((domain, name, "reference"))
    if kernel is None:
        return tuple(regions[0](*operands))
    shapes = [(a.dtype, a.shape) for a in operands]

    def run(*xs: Array) -> tuple[Any, ...]:
        return _several(kernel(*xs, **_options(options)))

    # Options and shapes are part of the key: a kernel may be right for some of them only.
    key = ("reference", f"{domain}.{name}", options, *shapes)
    _compare_once(key, kernel, shapes, run, lambda *xs: regions[0](*xs))
    return run(*operands)


def _several(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _compare_once(
    key: tuple[Any, ...],
    kernel: Kernel,
    operands: Sequence[tuple[Any, Sequence[int]]],
    run: Callable[..., Sequence[Any]],
    body: Callable[..., Sequence[Any]],
) -> None:
    """Refuse a kernel that differs from the body; one that passed is not compared again.

    key: engine, operator, and all that the comparison depends on. operands: element types, shapes.
    """
    if _CHECKED.get(key) is kernel:
        return
    # A fixed seed, so that a kernel is accepted or refused in every process alike.
    rng = np.random.default_rng(0)
    drawn = [_like(rng, dtype, shape) for dtype, shape in operands]
    _compare(key[1], key[0], run(*drawn), body(*drawn))
    if len(_CHECKED) >= MAX_CHECKED:
        _CHECKED.clear()
    _CHECKED[key] = kernel


def _like(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Return an operand that any body accepts: numbers of order one, or positions 0 and 1."""
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
    """Keep the node if it has a bprop; otherwise inline and differentiate the body's nodes."""
    body, *own = regions
    if own:
        ys = recorder().apply(custom_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
        return ys, lambda gs: control.pulled_by(own[0], inputs, ys, gs)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        back = vjp_of(body, control.float_positions(inputs), control.given_positions(gs))
        return control.by_operand(
            inputs, inline(back, [*inputs, *(g for g in gs if g is not None)])
        )

    return inline(body, list(inputs)), pullback


def _emit_custom(context: EmissionContext, node: Node) -> None:
    """Emit a call of a local function that holds the body."""
    name, domain = str(node.attrs["name"]), str(node.attrs["domain"])
    called = context.local_function(name, domain, node.regions[0])
    context.add(called, context.inputs(node), context.output_names(node), domain=domain)


custom_row = Op(
    name="Custom",
    computes="its region of the operands: the body of a user's operator, which keeps its name",
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
"""This process's kernels by (domain, name, engine); the newest definition of a name counts."""
_CHECKED: Final[dict[Any, Kernel]] = {}
"""The kernels that gave what their body gives, by the key of the comparison."""
MAX_CHECKED: Final = 10_000
"""Comparisons remembered; when there are more, all are forgotten and made again."""


@dataclass(frozen=True)
class CustomOp:
    """An operator defined by `custom`; call it with tensors, and options by keyword."""

    name: str
    domain: str
    body: Callable[..., Any]
    bprop: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the result of the body: a tensor, or a tuple of them."""
        encoded = _json(self.name, options)
        flat = [as_tensor(x) for x in inputs]
        types = [x.type for x in flat]
        body, value = region(self.name, types, lambda xs: self.body(*xs, **options))
        results = control.inside(body, _several(value))
        functions = [control.closed(body, results, f"the operator {self.name}")]
        if self.bprop is not None:
            functions.append(self._back(flat, results, options))
        outputs = recorder().apply(
            custom_row,
            flat,
            {"name": self.name, "domain": self.domain, "options": encoded},
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
            y, g = (x[0] if len(x) == 1 else tuple(x) for x in (ys, gs))
            cotangents = _several(self.bprop(*xs[:n], y=y, g=g, **options))
            if len(cotangents) != n:
                raise InvalidInput(
                    f"bprop of {self.name} must return a cotangent per input ({n}), got "
                    f"{len(cotangents)}; return None where no gradient passes"
                )
            # Only floating-point operands have a cotangent; what bprop returns for the others is
            # dropped.
            pairs = [(x, c) for x, c in zip(xs, cotangents, strict=False) if x.dtype.is_float]
            return [zeros(x.shape, x.dtype) if c is None else as_tensor(c) for x, c in pairs]

        types = [*(x.type for x in flat), *(y.type for y in results), *floats]
        return control.closed(
            *region(f"{self.name}.bprop", types, back), f"the operator {self.name}"
        )


def custom(
    name: str,
    *,
    domain: str,
    bprop: Callable[..., Any] | None = None,
    kernels: Mapping[str, Kernel] | None = None,
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make a function of tensors, written in operators, an operator of that name (a decorator).

    The body may take options by keyword: numbers, strings, lists of them. `bprop(*inputs, y=, g=,
    **options)` returns a cotangent per input. kernels: by engine; "reference" takes and returns
    numpy arrays; "onnx", "ascend" and "xla" are other bodies in operators. Each takes the options,
    with the body's defaults.

    >>> import numpy as np
    >>> from triplane.unified_ir import graph, ops
    >>> @ops.custom("Swoosh", domain="org.example")
    ... def swoosh(x, *, slope=0.1):
    ...     return ops.softplus(x) - slope * x
    >>> graph(lambda x: swoosh(x, slope=0.5))(np.float32(0.0)).round(3)
    np.float32(0.693)
    """
    _check_name(name, domain)

    def define(body: Callable[..., Any]) -> CustomOp:
        for engine, kernel in (kernels or {}).items():
            KERNELS[domain, name, engine] = kernel
        return CustomOp(name, domain, body, bprop)

    return define


def _json(name: str, options: Mapping[str, Any]) -> str:
    try:
        # Sorted, so that equal options give equal attributes and the same file.
        return json.dumps(dict(sorted(options.items())))
    except TypeError as error:
        raise InvalidInput(
            f"options of {name} are numbers, strings and lists of them: {error}; pass tensors "
            "by position"
        ) from error


def with_kernels(table: Table, function: Function, engine: str) -> Function:
    """Return the function with this process's kernels for `engine` as bodies of its operators."""
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
            _check_kernel(table, body, node.regions[0], (engine, f"{domain}.{name}", kernel))
            regions = (body, *regions[1:])
    return replace(node, regions=regions)


def _recorded(table: Table, node: Node, kernel: Kernel) -> Function:
    body = node.regions[0]
    options = _options(str(node.attrs.get("options", "{}")))
    build = Build(table, body.name)
    with build:
        results = _several(kernel(*(build.param(p.name, p.type) for p in body.params), **options))
    return build.finish(control.numbered(results))


def _check_kernel(
    table: Table, replacement: Function, body: Function, what: tuple[str, str, Kernel]
) -> None:
    """Refuse a kernel that differs from the body."""
    engine, name, kernel = what
    types = [[str(v.type) for v in f.results] for f in (replacement, body)]
    if types[0] != types[1]:
        raise InvalidInput(f"the {engine} kernel of {name} gives {types[0]}, its body {types[1]}")
    symbols = sorted(set().union(*(p.type.symbols for p in body.params)))
    # Different small sizes, so that a kernel which exchanges two axes is noticed.
    sizes = {s: 3 + i for i, s in enumerate(symbols)}
    _compare_once(
        (engine, name, *(str(p.type) for p in body.params), *types[0]),
        kernel,
        [(p.type.dtype.numpy, p.type.concrete(sizes)) for p in body.params],
        lambda *xs: run_function(table, replacement, xs),
        lambda *xs: run_function(table, body, xs),
    )
