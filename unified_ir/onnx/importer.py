"""An ONNX model as a module: weights become state, old definitions the newest, sizes stay symbols.

Every node is recorded through its operator's row, so types are inferred and those in the file are
not trusted. Local functions, and operators without a row but with a body in ONNX, are inlined. A
node that cannot be imported is refused, naming the node, the operator and the opset.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    defs,
    helper,
)

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.ir import Function, Module, limits
from triplane.unified_ir.ir.graph import NO_META, Array, Meta
from triplane.unified_ir.ir.meta import LABELS
from triplane.unified_ir.ir.types import ShapeError, is_plain
from triplane.unified_ir.onnx.agreeing import agreeing
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.branches import BRANCHES
from triplane.unified_ir.onnx.emit import PRODUCER
from triplane.unified_ir.onnx.foreign import FOREIGN
from triplane.unified_ir.onnx.functions import (
    body_of,
    check_expanded,
    domain_of,
    has_body,
    local_functions,
)
from triplane.unified_ir.onnx.known_values import KnownValues
from triplane.unified_ir.onnx.lift import lift
from triplane.unified_ir.onnx.merged import separated
from triplane.unified_ir.onnx.multi_device import read_annotations
from triplane.unified_ir.onnx.order import needed_in_order
from triplane.unified_ir.onnx.scope import Scope, TrainableChoice, Weights
from triplane.unified_ir.onnx.source import Source, array_of, read_model
from triplane.unified_ir.onnx.structure import STRUCTURES, Site
from triplane.unified_ir.onnx.symbols import Shapes, Symbols, declared_type, tensor_type
from triplane.unified_ir.onnx.uses import Functions, Uses
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.row import MEANING_OPSET, Op
from triplane.unified_ir.ops.rows.control.custom_ops import custom_row, is_own
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor

ENTRY: Final = "predict"
OLDEST_OPSET: Final = 7
MAX_NODES: Final = limits.MAX_NODES
"""The most nodes of a model after its functions are inlined."""
MAX_SUGGESTED: Final = 4
MAX_COMPARED: Final = 20_000
"""The most names that an unknown name is compared with, letter by letter."""

_STRUCTURES: Final = {**STRUCTURES, **BRANCHES}


def import_onnx(
    source: Source,
    *,
    shapes: Shapes | None = None,
    outputs: Sequence[str] | None = None,
    trainable: Sequence[str] = (),
    frozen: Sequence[str] = (),
    tie: Sequence[str] = (),
) -> Module:
    """Return a module with the entry `predict` from an ONNX model, opsets 7 to 26, any IR version.

    source: a path, bytes, or a ModelProto. shapes: sizes of inputs by name, to name or relax the
    sizes in the file: `{"image": ("N", 3, "H", "W")}`; equal names mean equal sizes.
    outputs: values to return instead of the model's outputs, by their names in the graph; nodes
    that they do not need are left out. This removes the head of a network: see `nn.Imported`.
    Weights keep their names. Arrays read as weights are parameters, other arrays of floats, such as
    running statistics, are buffers; see `uses`. trainable, frozen: patterns of names ("rope.*",
    "*.inv_freq") whose tensors are parameters, or are not, whatever their use; trainable wins if
    both match. Running statistics stay buffers: gradients do not reach them.
    tie: patterns of names; matching parameters that are equal bit for bit, or transposed, become
    one, under the name read first, because exporters write a shared weight twice.

    Raise NotFound for a missing file, Corrupt for bytes that are not a valid model, InvalidInput
    for a valid model that cannot be imported; the message names node, operator, opset and way out.
    """
    model, folder = read_model(source)
    named_shapes = shapes or {}
    unknown = sorted(named_shapes.keys() - {i.name for i in model.graph.input})
    if unknown:
        have = ", ".join(i.name for i in model.graph.input)
        raise InvalidInput(f"shapes= names the input {unknown[0]!r}; the model has {have}")
    build = Build(TABLE, ENTRY)
    choice = TrainableChoice(trainable, frozen)
    initializers = {t.name for t in model.graph.initializer}
    inputs = {i.name for i in model.graph.input} - initializers  # names that no weight may take
    weights = Weights(build, folder, inputs, choice, tie)
    importer = Importer(model, build, weights)
    with build:
        function = importer.top(named_shapes, outputs)
    choice.check()
    weights.check_tied()
    state = weights.state
    # Class names belong to the model's own outputs.
    meta = _meta(model, function, state) | (_labels(model) if outputs is None else {})
    return Module({ENTRY: function}, {ENTRY: ENTRY}, state, meta)


def _meta(model: ModelProto, function: Function, state: Mapping[str, Any]) -> dict[str, str]:
    inputs = {p.name: str(p.type) for p in function.params if p.name not in state}
    versions = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    return {
        "inputs": json.dumps(inputs),
        "onnx.opsets": json.dumps(versions),
        "onnx.producer": f"{model.producer_name} {model.producer_version}".strip()[:200],
    }


def _labels(model: ModelProto) -> dict[str, str]:
    """Return the class names of a model that Triplane exported; other tools have other forms."""
    text = next((p.value for p in model.metadata_props if p.key == LABELS), "")
    try:
        names = json.loads(text) if model.producer_name == PRODUCER and text else []
    except (ValueError, RecursionError):
        names = []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {LABELS: text} if names and is_list else {}


@dataclass(frozen=True, slots=True)
class Frame:
    """The context in which the nodes of one graph or function body are imported."""

    scope: Scope
    opsets: Mapping[str, int]
    attrs: Mapping[str, AttributeProto]
    place: str = ""

    def place_of(self, node: NodeProto) -> str:
        """Return the names of the enclosing calls and of the node itself."""
        return ".".join(name for name in (self.place, node.name) if name)


class Importer:
    """Imports one model into one build."""

    def __init__(self, model: ModelProto, build: Build, weights: Weights) -> None:
        self.model = model
        self.build = build
        self.weights = weights
        self.contents = KnownValues()
        self.symbols = Symbols(model.graph.input)
        self.functions = local_functions(model.functions)
        self.bodies = Functions(self.functions)
        self.configurations = dict.fromkeys(c.name for c in model.configuration)
        self.nodes = 0

    def top(self, shapes: Shapes, wanted: Sequence[str] | None) -> Function:
        """Return the whole graph as a function of its inputs and weights."""
        graph = self.model.graph
        opsets = _opsets(self.model.opset_import)
        nodes, initializers = separated(graph, self.weights.folder)
        held = {t.name for t in initializers} | {t.values.name for t in graph.sparse_initializer}
        inputs = {i.name for i in graph.input} - held
        scope = Scope(self.build, self.weights, Uses(nodes, held, inputs, self.bodies))
        for info in graph.input:
            if info.name in held:
                continue
            _named(info.name, "input")
            type_ = declared_type(info, self.symbols, shapes)
            scope.define(info.name, self.build.param(info.name, type_))
        _check_dense(graph)
        scope.declare(initializers)
        # Before any node is recorded: inlining is the work that the limit is about.
        check_expanded(graph, self.functions, MAX_NODES)
        outputs = [info.name for info in graph.output] if wanted is None else list(wanted)
        if not outputs:
            raise InvalidInput("the model has no outputs")
        for name in outputs:
            _named(name, "output")
        if len(set(outputs)) < len(outputs):
            raise InvalidInput(f"each output is listed once, got {outputs[:8]}")
        if wanted is not None:
            _check_wanted(graph, outputs)
        results = self.run(nodes, outputs, Frame(scope, opsets, {}))
        if wanted is None:
            _check_outputs(graph, results)
        return self.build.finish(dict(zip(outputs, results, strict=True)))

    def run(self, nodes: Iterable[NodeProto], outputs: Sequence[str], frame: Frame) -> list[Tensor]:
        """Import the nodes that the outputs need, in order; return the outputs."""
        for node in needed_in_order(list(nodes), outputs):
            self.node(node, frame)
        return [frame.scope.read(name, "output") for name in outputs]

    def inner(
        self,
        graph: GraphProto,
        params: Sequence[Tensor],
        frame: Frame,
        build: Build,
        label: str = "",
    ) -> list[Tensor]:
        """Record a graph inside a node into `build`; return its outputs on the given inputs."""
        prefix = ".".join(p for p in (frame.scope.prefix, label) if p)
        scope = Scope(build, self.weights, frame.scope.uses, frame.scope, prefix)
        for info, x in zip(graph.input, params, strict=True):
            scope.define(info.name, x)
        _check_dense(graph)
        scope.declare(graph.initializer)
        outputs = [info.name for info in graph.output]
        return self.run(graph.node, outputs, replace(frame, scope=scope))

    def node(self, node: NodeProto, frame: Frame) -> None:
        """Import one node."""
        # Counted again while importing: the body of a loop is recorded once for each widening of
        # its carry.
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise InvalidInput(f"the model has more than {MAX_NODES} nodes, functions inlined")
        label = _label(node, frame)
        try:
            self._node(node, frame)
        except TriplaneError as error:
            raise _explained(label, error) from error
        except RecursionError as error:
            raise InvalidInput(f"{label}: it is nested too deeply") from error
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError) as e:
            raise InvalidInput(
                f"{label}: its operands or attributes do not fit it ({type(e).__name__}: {e})"
            ) from e

    def _node(self, node: NodeProto, frame: Frame) -> None:
        inputs = [
            frame.scope.read(name, f"operand {i}") if name else None
            for i, name in enumerate(node.input)
        ]
        place = frame.place_of(node)
        meta = Meta(None, place[:200]) if place else NO_META
        outputs = len(node.output)
        # Trailing outputs without a name are not asked for; operators may have a cheaper form then.
        while outputs > 1 and not node.output[outputs - 1]:
            outputs -= 1
        start = len(self.build.nodes)
        with frame.scope.build.at(meta):
            tensors = self.apply(node, inputs, outputs, frame)
        if node.device_configurations and frame.scope.build is self.build:
            read_annotations(self.configurations, node, inputs, self.build, start)
        if len(tensors) < outputs:
            raise InvalidInput(f"the node names {outputs} outputs, the operator has {len(tensors)}")
        for name, x in zip(node.output, tensors, strict=False):
            if name:
                frame.scope.define(name, x)

    def apply(
        self, node: NodeProto, inputs: list[Tensor | None], outputs: int, frame: Frame
    ) -> Sequence[Tensor]:
        """Return the values of a node: of a local function, a structure, a row or a body."""
        domain = domain_of(node.domain)
        local = self.bodies.of(node)
        if local is not None:
            kept = self.own(local, node, inputs, frame)
            return self.call(local, node, inputs, frame) if kept is None else kept
        schema = _schema(node, domain, frame.opsets)
        structure = None if domain else _STRUCTURES.get(node.op_type)
        if structure is not None:
            return structure(Site(self, node, inputs, frame))
        foreign = FOREIGN.get((domain, node.op_type))
        if foreign is not None:
            attrs = self.attrs(node, frame)
            return foreign(Application(node.op_type, 1, tuple(inputs), attrs, outputs))
        row = TABLE.get((domain, node.op_type))
        if domain or (row is None and has_body(schema)):
            return self.body(schema, node, inputs, frame)
        attrs = self.attrs(node, frame)
        app = Application(node.op_type, schema.since_version, tuple(inputs), attrs, outputs)
        lifted = lift(app, frame.opsets[domain])
        return lifted if isinstance(lifted, tuple) else self.applied(lifted, frame.scope.build)

    def applied(self, app: Application, build: Build) -> Sequence[Tensor]:
        """Return the outputs of an application in the newest definition."""
        row = TABLE.get(("", app.op))
        if row is None:
            raise InvalidInput(f"there is no row for {app.op} in the operator table")
        folded = self.contents.folded(build, row, app)
        if folded is not None:
            return (folded,)
        first, *rest = self.recorded(app, row, build)
        return (self.contents.note(app, first), *rest)

    def recorded(self, app: Application, row: Op, build: Build) -> Sequence[Tensor]:
        """Return the outputs of the row; if sizes do not fit, claim that they are equal."""
        try:
            return build.apply(row, app.inputs, app.attrs, outputs=app.outputs)
        except ShapeError:
            with build:
                # Sizes of the model's inputs, of which the caller decides.
                named = frozenset().union(*(p.type.symbols for p in self.weights.build.params))
                fitting = agreeing(app, row, named, self.contents.of)
                if fitting is None:
                    raise
                return build.apply(row, fitting.inputs, fitting.attrs, outputs=app.outputs)

    def attrs(self, node: NodeProto, frame: Frame) -> dict[str, Any]:
        """Return attributes as Python values; references are those of the function called."""
        attrs: dict[str, Any] = {}
        for attribute in self.resolved(node, frame):
            if attribute.name in attrs:
                raise InvalidInput(f"the attribute {attribute.name!r} is given twice")
            attrs[attribute.name] = self.value(attribute)
        return attrs

    def resolved(self, node: NodeProto, frame: Frame) -> list[AttributeProto]:
        """Return a node's attributes, with references replaced by attributes of the call."""
        attributes = []
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                attributes.append(attribute)
            # ONNX: a reference to an attribute that the call does not set leaves the attribute out.
            elif attribute.ref_attr_name in frame.attrs:
                copy = deepcopy(frame.attrs[attribute.ref_attr_name])
                copy.name = attribute.name
                attributes.append(copy)
        return attributes

    def value(self, attribute: AttributeProto) -> Any:
        """Return an attribute's value: numbers, text, arrays."""
        if attribute.type == AttributeProto.TENSOR:
            return array_of(attribute.t, self.weights.folder)
        if attribute.type == AttributeProto.TYPE_PROTO:
            return tensor_type(attribute.tp, f"{attribute.name!r}", "", self.symbols, {})
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, (int, float, str)):
            return value
        if attribute.type in {AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS}:
            return tuple(v.decode() if isinstance(v, bytes) else v for v in value)
        kind = AttributeProto.AttributeType.Name(attribute.type)
        raise InvalidInput(f"the attribute {attribute.name!r} is of kind {kind}")

    def call(
        self,
        function: FunctionProto,
        node: NodeProto,
        inputs: Sequence[Tensor | None],
        frame: Frame,
        extra: Sequence[AttributeProto] = (),
    ) -> list[Tensor]:
        """Inline a function; return its outputs."""
        if len(inputs) > len(function.input):
            raise InvalidInput(f"{function.name!r} takes {len(function.input)} operands")
        # Later ones win: defaults of the schema, then of the function, then what the call sets.
        attributes = {a.name: a for a in (*extra, *function.attribute_proto)}
        attributes |= {a.name: a for a in self.resolved(node, frame)}
        is_local = self.bodies.of(node) is function
        uses = self.bodies.uses(function) if is_local else Uses(function.node)
        scope = Scope(frame.scope.build, self.weights, uses, None, node.name)
        absent = set(function.input[len(inputs) :])
        for name, x in zip(function.input, inputs, strict=False):
            if x is None:
                absent.add(name)
            else:
                scope.define(name, x)
        opsets = {**frame.opsets, **_opsets(function.opset_import)}
        inner = Frame(scope, opsets, attributes, frame.place_of(node))
        nodes = [_without_absent(n, absent) for n in function.node]
        outputs = [n if o else "" for n, o in zip(function.output, node.output, strict=False)]
        wanted = [n for n in outputs if n]
        results = dict(zip(wanted, self.run(nodes, wanted, inner), strict=True))
        # An output that nobody reads still takes a place in the list; its value does not matter.
        return [results[n] if n else next(iter(results.values())) for n in outputs]

    def own(
        self,
        function: FunctionProto,
        node: NodeProto,
        inputs: Sequence[Tensor | None],
        frame: Frame,
    ) -> Sequence[Tensor] | None:
        """Import a function that `ops.custom` named as its operator; None if it must be inlined."""
        # Only a function that our emitter wrote is known to be an operator of `ops.custom`.
        # Attributes would be parameters of the body, which a region does not have.
        ours = self.model.producer_name == PRODUCER and not node.attribute
        if not ours or not is_own(function.name, function.domain) or any(x is None for x in inputs):
            return None
        build = Build(TABLE, function.name)
        present = [x for x in inputs if x is not None]
        with build:
            params = [build.param(f"x{i}", x.type) for i, x in enumerate(present)]
            scope = Scope(build, self.weights, frame.scope.uses)
            results = self.call(function, node, params, replace(frame, scope=scope))
        # A weight or outer value inside: the operator would not be closed.
        if build.captured:
            return None
        region = build.finish({f"y{i}": y for i, y in enumerate(results)})
        attrs = {"name": function.name, "domain": function.domain}
        return frame.scope.build.apply(
            custom_row, present, attrs, regions=(region,), outputs=len(results)
        )

    def body(
        self,
        schema: defs.OpSchema,
        node: NodeProto,
        inputs: Sequence[Tensor | None],
        frame: Frame,
    ) -> list[Tensor]:
        """Import an operator without a row by the body that ONNX defines for it."""
        if not has_body(schema):
            domain = f"{schema.domain}." if schema.domain else ""
            raise InvalidInput(f"there is no row for {domain}{schema.name} in the operator table")
        plain = deepcopy(node)
        del plain.attribute[:]
        plain.attribute.extend(self.resolved(node, frame))
        types = [None if x is None else x.type for x in inputs]
        function = body_of(schema, plain, types, frame.opsets.get("", MEANING_OPSET))
        defaults = [a.default_value for a in schema.attributes.values() if a.default_value.name]
        return self.call(function, node, inputs, frame, defaults)

    def constant(self, name: str, array: Array, scope: Scope) -> Tensor:
        """Return a constant, or a weight if its readers use it as one."""
        # Not kind "f": numpy has bfloat16 and the 8-bit floats under kind "V".
        floats = array.dtype.kind not in "iubO" and array.ndim and array.size > 1
        if floats and (scope.uses.weighs(name, array) or scope.is_wanted(name)):
            return scope.held(name, array)
        return scope.build.constant(array)


def _check_dense(graph: GraphProto) -> None:
    if graph.sparse_initializer:
        raise InvalidInput("sparse initializers are not supported; store dense ones")


def _check_wanted(graph: GraphProto, outputs: Sequence[str]) -> None:
    """Refuse a name that the model does not have, and suggest similar ones."""
    held = [i.name for i in graph.input] + [t.name for t in graph.initializer]
    names = dict.fromkeys([*(name for node in graph.node for name in node.output), *held])
    for output in outputs:
        if output in names:
            continue
        likely = [n for node in graph.node if node.name == output for n in node.output]
        likely += [n for n in names if n.startswith(output) or n.endswith(output)]
        # The comparison takes quadratic time in the length of a name.
        likely += difflib.get_close_matches(output, [*names][:MAX_COMPARED], n=MAX_SUGGESTED)
        # Without a similar name, those that come last are the most likely to be wanted.
        last = [name for node in graph.node[-MAX_SUGGESTED:] for name in node.output if name]
        suggested = [*dict.fromkeys(likely)][:MAX_SUGGESTED] or last[-MAX_SUGGESTED:]
        raise InvalidInput(
            f"output {output[:80]!r} is not produced by any node, input or initializer; there are "
            f"{', '.join(repr(n[:80]) for n in suggested) or 'none'}"
            f"{'' if likely else ' at the end of the graph'}"
        )


def _check_outputs(graph: GraphProto, results: Sequence[Tensor]) -> None:
    """Compare declared element types with the inferred ones; declared sizes are often outdated."""
    names = {number: name for name, number in TensorProto.DataType.items()}
    for info, x in zip(graph.output, results, strict=True):
        declared = info.type.tensor_type.elem_type if is_plain(x.type) else 0
        if declared and declared != x.dtype.onnx:
            raise InvalidInput(
                f"output {info.name[:80]!r} is declared with elements of type {declared} "
                f"({names.get(declared, 'unknown')}), the graph gives {x.type}; correct the "
                "declaration"
            )


def _opsets(imports: Iterable[Any]) -> dict[str, int]:
    versions: dict[str, int] = {}
    for entry in imports:
        domain = domain_of(entry.domain)
        if versions.setdefault(domain, int(entry.version)) != entry.version:
            raise InvalidInput(f"two versions of the domain {domain!r} are imported")
    return versions


def _schema(node: NodeProto, domain: str, opsets: Mapping[str, int]) -> defs.OpSchema:
    """Return the definition of a node's operator; refuse an unknown domain, opset or name."""
    if domain not in opsets:
        raise InvalidInput(
            f"the model imports no opset of the domain {domain!r}; add it to opset_import"
        )
    opset = opsets[domain]
    read = OLDEST_OPSET <= opset <= defs.onnx_opset_version()
    if domain == "" and not (read or _unchanged(node.op_type, opset)):
        raise InvalidInput(
            f"models of opsets {OLDEST_OPSET} to {MEANING_OPSET} can be imported, this one has "
            f"{opset}; convert it with onnx.version_converter"
        )
    try:
        return defs.get_schema(node.op_type, opset, domain)
    except defs.SchemaError:
        known = "of ai.onnx" if domain == "" else f"of the domain {domain!r}"
        raise InvalidInput(
            f"no operator {known} has this name in opset {opset}; if it is a custom operator, add "
            "a local function with its name to the model"
        ) from None


def _unchanged(op: str, opset: int) -> bool:
    """Return whether an operator of an older opset is defined as in the oldest supported one."""
    return bool(defs.has(op, OLDEST_OPSET)) and (
        defs.get_schema(op, OLDEST_OPSET).since_version <= opset < OLDEST_OPSET
    )


def _without_absent(node: NodeProto, absent: set[str]) -> NodeProto:
    """Return the node without the operands that the caller left out."""
    if not absent.intersection(node.input):
        return node
    copy = deepcopy(node)
    copy.input[:] = ["" if name in absent else name for name in node.input]
    return copy


def _named(name: str, what: str) -> None:
    if not name or len(name.encode()) > limits.MAX_NAME_BYTES:
        raise InvalidInput(
            f"each {what} has a name of 1 to {limits.MAX_NAME_BYTES} bytes, got {name[:40]!r}"
        )


def _label(node: NodeProto, frame: Frame) -> str:
    name = f"node {node.name[:80]!r}" if node.name else f"node giving {list(node.output)[:1]}"
    domain = f"{node.domain}." if domain_of(node.domain) else ""
    opset = frame.opsets.get(domain_of(node.domain), "unknown")
    inside = f", in {frame.place[:80]}" if frame.place else ""
    return f"{name} ({domain}{node.op_type[:80]}, opset {opset}{inside})"


def _explained(label: str, error: TriplaneError) -> TriplaneError:
    """Put the innermost node in front of an error."""
    if getattr(error, "of_node", False):
        return error
    kind = type(error) if isinstance(error, (Corrupt, NotFound)) else InvalidInput
    explained = kind(f"{label}: {error}")
    explained.__dict__["of_node"] = True
    return explained
