"""A function as a plain ONNX model that stock onnxruntime runs.

Invariants: the same function gives the same bytes; the model uses only operators of ai.onnx and
those that the target names; parameters and results keep their names, except that the new value of a
parameter `w` is the output `w:next`. Rows that the target's opset lacks are replaced by their
bodies; symbolic sizes are read from the first value that has them.

Emission writes ONNX and makes no function, so it is not a `Rewriter` (decision 0056).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    defs,
    helper,
    numpy_helper,
)

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, is_symbol
from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ir.types import TensorType, float64, is_plain
from triplane.unified_ir.onnx.sizes import emit_dims
from triplane.unified_ir.onnx.target import DEFAULT, OnnxTarget
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs, type_proto
from triplane.unified_ir.ops.inline import with_new_sizes
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.fuse import fuse
from triplane.unified_ir.runtime.signature import next_name

PRODUCER: Final = "triplane"
WEIGHTS_FILE: Final = "weights.safetensors"
"""Location of the bytes of external initializers, relative to the model."""


@dataclass(frozen=True, slots=True)
class External:
    """The position of an initializer's bytes in the weights file."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class EmittedInitializer:
    """A parameter that the model holds itself; `external` keeps its bytes out of the graph."""

    array: Array
    external: External | None = None


def emit(
    function: Function,
    *,
    target: OnnxTarget = DEFAULT,
    initializers: Mapping[str, EmittedInitializer] | None = None,
) -> ModelProto:
    """Return the function as a model; parameters named in `initializers` become part of it.

    An initializer that no emitted node reads is left out: onnxruntime drops such tensors while it
    loads, and then refuses an array for it.
    """
    return emit_typed(function, target=target, initializers=initializers)[0]


def emit_typed(
    function: Function,
    *,
    target: OnnxTarget = DEFAULT,
    initializers: Mapping[str, EmittedInitializer] | None = None,
) -> tuple[ModelProto, dict[str, TensorType]]:
    """Like `emit`, with the type of each ONNX value that represents a value of the function."""
    if not function.results:
        raise InvalidInput(f"{function.name!r} has no results; an ONNX graph needs one, return it")
    emitter = Emitter(target, fuse(clean(function)), initializers or {})
    model = emitter.model(producer_name=PRODUCER)
    return model, {name: value.type for value, name in emitter.names.items()}


def _opsets(opset: int, domains: Iterable[str]) -> list[OperatorSetIdProto]:
    """Return the versions of domains; operators of users and of runtimes have only one version."""
    others = sorted({*domains} - {""})
    return [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in others)]


def emit_located(
    function: Function, *, target: OnnxTarget = DEFAULT
) -> tuple[ModelProto, dict[str, Node]]:
    """Like `emit`, but with a unique name for every node, and the IR node for each of these names.

    Nodes in subgraphs have names too. A node from a row's body belongs to the node of that row.
    """
    emitter = _Located(target, fuse(clean(function)), {})
    return emitter.model(), emitter.places


def serialize(model: ModelProto) -> bytes:
    """Return the model's bytes, the same on every run."""
    return model.SerializeToString(deterministic=True)


class Emitter(EmissionContext):
    """Emits one ONNX graph: its names, nodes and known sizes; a region also sees its parent's."""

    def __init__(
        self,
        target: OnnxTarget,
        function: Function,
        held: Mapping[str, EmittedInitializer],
        parent: Emitter | None = None,
    ) -> None:
        self._target = target
        self.function = function
        self.initializers = held
        self.parent = parent
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.names: dict[Value, str] = {}
        self.contents: dict[Value, Known] = {}
        self.size_sources: dict[str, tuple[str, int]] = {}
        self.size_names: dict[str, str] = {}
        self.ranked: dict[tuple[str, int], str] = {}
        # Shared by the emitters of all regions: names are unique in the whole model, since ONNX's
        # subgraphs see the names of the graphs around them.
        self.functions: list[FunctionProto] = parent.functions if parent else []
        self.counter: list[int] = parent.counter if parent else [0]
        self.taken: frozenset[str] = parent.taken if parent else _users_names(function)

    @property
    def target(self) -> OnnxTarget:
        """What the graph may use."""
        return self._target

    def model(self, **header: Any) -> ModelProto:
        """Emit the whole model."""
        graph = self.graph()
        domains = {f.domain for f in self.functions} | _domains(graph.node)
        return helper.make_model(
            graph,
            ir_version=self._target.ir_version,
            functions=self.functions,
            opset_imports=_opsets(self.target.opset, domains),
            **header,
        )

    def graph(self) -> GraphProto:
        """Emit the whole top-level graph."""
        for param in self.function.params:
            self.names[param] = param.name
            self.note_sizes(param, param.name)
        self.body(self.function)
        outputs = self.outputs()
        read = self._drop_unread([info.name for info in outputs])
        inputs = [
            _info(p.name, p.type) for p in self.function.params if p.name not in self.initializers
        ]
        held = [p for p in self.function.params if p.name in self.initializers and p.name in read]
        initializers = [held_tensor(p, self.initializers[p.name]) for p in held] + self.tensors
        return helper.make_graph(
            self.nodes, self.function.name, inputs, outputs, initializer=initializers
        )

    def outputs(self) -> list[ValueInfoProto]:
        """Declare the results; one that is a parameter or repeats goes through Identity."""
        infos = []
        for final, value in zip(_output_names(self.function), self.function.results, strict=True):
            # Each result first goes through an Identity to its final name; most of these are
            # removed below.
            self.nodes.append(helper.make_node("Identity", [self.names[value]], [final]))
            infos.append(_info(final, value.type))
        self._drop_identities([info.name for info in infos])
        return infos

    def _drop_identities(self, finals: Sequence[str]) -> None:
        """Rename a producer's output to the final name if nothing else needs the old one."""
        first = len(self.nodes) - len(finals)
        tail = self.nodes[first:]
        produced = {out: node for node in self.nodes[:first] for out in node.output}
        times = Counter(n.input[0] for n in tail)
        used_inside = {name for node in self.nodes[:first] for name in _region_names(node)}
        kept = []
        renamed: dict[str, str] = {}
        for node in tail:
            source = node.input[0]
            # Not if a subgraph reads the old name, and not if two results are one value.
            if source in produced and times[source] == 1 and source not in used_inside:
                renamed[source] = node.output[0]
            else:
                kept.append(node)
        self.nodes = self.nodes[:first] + kept
        for node in self.nodes:
            for names in (node.input, node.output):
                if not renamed.keys().isdisjoint(names):
                    names[:] = [renamed.get(name, name) for name in names]

    def _drop_unread(self, finals: Sequence[str]) -> set[str]:
        """Drop nodes that nothing reads, such as sizes for a Reshape to -1; return names read."""
        read = set(finals)
        kept = []
        for node in reversed(self.nodes):
            if read.intersection(node.output):
                kept.append(node)
                read.update([*node.input, *_region_names(node)])
        self.nodes = kept[::-1]
        self.tensors = [t for t in self.tensors if t.name in read]
        return read

    def body(self, function: Function) -> None:
        """Emit the nodes of a function whose parameters are already named."""
        for node in function.nodes:
            self.node(node)
            note_contents(row_of(node), node, self.contents)
            for value in node.outputs:
                self.note_sizes(value, self.names[value])

    def node(self, node: Node) -> None:
        """Emit one IR node: by its row's rule, an opset rule, its body, or unchanged."""
        row = row_of(node)
        native = row.native is None or row.native(node, self.target.opset)
        if self.target.device == "cuda" and row.native_on_cuda is not None:
            native = native and row.native_on_cuda(node)
        if row.emit is not None and native:
            row.emit(self, node)
            return
        if row.domain == "" and native and self.available(node):
            for below, rule in row.lower_below.items():
                if self.target.opset < below:
                    rule(self, node)
                    return
            self.plain(node)
            return
        meaning = expansion(TABLE, node, self.contents)
        if meaning is None:
            why = " for float64" if defs.has(node.op.name, self.target.opset, "") else ""
            raise InvalidInput(
                f"{row} does not exist in opset {self.target.opset}{why} and has no other form (at "
                f"{node.meta.location}); choose a target with a newer opset"
            )
        # The counter differs at each node, so sizes that the body introduces get new names each
        # time.
        self.inline(node, clean(with_new_sizes(meaning, f"inner_{self.counter[0]}")))

    def available(self, node: Node) -> bool:
        """Return whether the target's opset has the operator, in any version lowered by a rule.

        Rows accept float64 wherever they accept float32; not every operator of ONNX does.
        """
        if not defs.has(node.op.name, self.target.opset, ""):
            return False
        schema = defs.get_schema(node.op.name, self.target.opset, "")
        return all(
            v is None
            or not is_plain(v.type)
            or v.type.dtype != float64
            or "tensor(double)" in schema.inputs[min(i, len(schema.inputs) - 1)].types
            for i, v in enumerate(node.inputs)
        )

    def plain(self, node: Node, **changes: Any) -> None:
        """Emit the ONNX operator of the same name."""
        self._copy(node, self.inputs(node), {**node.attrs, **changes})

    def plain_broadcast(self, node: Node) -> None:
        """Like `plain`, with operands of one element at a rank that runtimes are fast with."""
        self._copy(node, self.beside_ones(node, self.inputs(node)), node.attrs)

    def _copy(self, node: Node, inputs: Sequence[str], changed: Mapping[str, Any]) -> None:
        # None among the changes removes an attribute.
        attrs = onnx_attrs({k: v for k, v in changed.items() if v is not None})
        schema = row_of(node).schema
        fewest = schema.min_output if schema else 1
        # A schema may require outputs that nothing reads.
        unread = [self.fresh() for _ in range(fewest - len(node.outputs))]
        outputs = [*self.output_names(node), *unread]
        self.add(node.op.name, inputs, outputs, **attrs)

    def beside_ones(self, node: Node, names: list[str]) -> list[str]:
        """Return the operands, those of one element with a rank beyond the trailing axes of 1.

        onnxruntime 1.31 combines (O, C, 1, 1) with a scalar element by element, which takes sixty
        times as long as with (1, 1, 1).
        """
        shape = node.outputs[0].type.shape
        ones = next((i for i, d in enumerate(reversed(shape)) if d != 1), 0)
        return [
            name if not ones or v is None or v.type.rank > ones else self._ranked(name, ones + 1)
            for name, v in zip(names, node.inputs, strict=True)
        ]

    def _ranked(self, name: str, rank: int) -> str:
        """Return one element as a tensor of this rank."""
        if (name, rank) not in self.ranked:
            held = self.constants.get(name)
            shape = (1,) * rank
            self.ranked[name, rank] = (
                self.emit("Reshape", name, self.constant(np.array(shape)))
                if held is None
                else self.constant(numpy_helper.to_array(held).reshape(shape))
            )
        return self.ranked[name, rank]

    def inline(self, node: Node, meaning: Function) -> None:
        """Emit another function's nodes in place of the node."""
        present = [v for v in node.inputs if v is not None]
        for param, value in zip(meaning.params, present, strict=True):
            self.names[param] = self.names[value]
            if value in self.contents:
                self.contents[param] = self.contents[value]
        self.body(meaning)
        for value, result in zip(node.outputs, meaning.results, strict=False):
            self.names[value] = self.names[result]

    def region(self, function: Function, names: Sequence[str], label: str) -> GraphProto:
        """Emit a region as a subgraph without inputs, whose parameters have these outer names."""
        return self.subgraph(function, 0, names, label)

    def subgraph(
        self, region: Function, own: int, captures: Sequence[str], label: str = ""
    ) -> GraphProto:
        """Emit a region; its first `own` parameters are inputs, the rest have outer names."""
        inner = self.child(region)
        inputs = []
        for i, param in enumerate(region.params):
            name = self.fresh() if i < own else captures[i - own]
            inner.names[param] = name
            inner.note_sizes(param, name)
            if i < own:
                inputs.append(_info(name, param.type))
        inner.body(inner.function)
        infos = inner.result_infos()
        return helper.make_graph(inner.nodes, label or region.name, inputs, infos, inner.tensors)

    def held(self, name: str) -> Array | None:
        """Return the array of that name; None if it is not one of the model's constants."""
        tensor = next((t for t in self.tensors if t.name == name), None)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def producer(self, name: str, op: str) -> tuple[list[str], dict[str, Any]] | None:
        """Return inputs and attributes of a value's producer; None if that is not an `op`."""
        for node in self.nodes:
            if node.op_type == op and name in node.output:
                attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
                return list(node.input), attrs
        return None

    def local_function(self, name: str, domain: str, body: Function) -> str:
        """Return the name of a local function with this body; a second body of a name gets `_2`."""
        inner = Emitter(self.target, clean(body), {})
        # The function is closed, so it is emitted by itself; equal bodies give equal names, and the
        # comparison below finds them.
        inner.functions = self.functions
        graph = inner.graph()
        constants = []
        for tensor in inner.tensors:
            # ONNX's functions have no initializers, so constants become nodes.
            nameless = deepcopy(tensor)
            nameless.ClearField("name")
            constants.append(helper.make_node("Constant", [], [tensor.name], value=nameless))
        function = helper.make_function(
            domain,
            name,
            [i.name for i in graph.input],
            [o.name for o in graph.output],
            [*constants, *graph.node],
            _opsets(self.target.opset, _domains(graph.node)),
        )
        known = [f for f in self.functions if f.domain == domain]
        for number in count(1):
            function.name = name if number == 1 else f"{name}_{number}"
            same = [f for f in known if f.name == function.name]
            if function in same:
                return function.name
            if not same:
                self.functions.append(function)
                return function.name
        raise AssertionError  # pragma: no cover

    def child(self, function: Function) -> Emitter:
        """Return an emitter for a subgraph, which sees this graph's names and sizes."""
        return Emitter(self.target, clean(function), {}, self)

    def result_infos(self) -> list[ValueInfoProto]:
        """Declare the results of a subgraph, each under a name that this subgraph produces once."""
        produced = {name for node in self.nodes for name in node.output}
        infos: list[ValueInfoProto] = []
        for value in self.function.results:
            name = self.names[value]
            # An output of a subgraph must be produced in it: not a name from outside, and not the
            # same one twice.
            if name not in produced or any(info.name == name for info in infos):
                name = self.emit("Identity", name)
            infos.append(_info(name, value.type))
        return infos

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """Append an ONNX node."""
        node = helper.make_node(op, list(inputs), list(outputs), **attrs)
        node.name = f"n{len(self.nodes)}" if self.parent is None else ""
        self.nodes.append(node)

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append a node with one new output; return the output's name."""
        name = self.fresh()
        self.add(op, inputs, [name], **attrs)
        return name

    def constant(self, array: Array) -> str:
        """Add an initializer to this graph; return its name."""
        name = self.fresh("c")
        self.constants[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        self.tensors.append(self.constants[name])
        return name

    def fresh(self, stem: str = "v") -> str:
        """Return a name that no other value of the model has."""
        name = ""
        # Names of users may have the form v/1 too.
        while not name or name in self.taken:
            self.counter[0] += 1
            name = f"{stem}/{self.counter[0]}"
        return name

    def inputs(self, node: Node) -> list[str]:
        """Return the names of the operands, empty for absent ones."""
        return ["" if v is None else self.names[v] for v in node.inputs]

    def output_names(self, node: Node) -> list[str]:
        """Return new names for the outputs."""
        for value in node.outputs:
            self.names[value] = self.fresh()
        return [self.names[v] for v in node.outputs]

    def note_sizes(self, value: Value, name: str) -> None:
        """Remember where the size of each bare symbol can be read."""
        for axis, dim in enumerate(value.type.shape):
            # The first value in scope that has the size is read.
            if is_symbol(dim) and self.size_source(str(dim)) is None:
                self.size_sources[str(dim)] = (name, axis)

    def size_source(self, symbol: str) -> tuple[str, int] | None:
        """Return (value name, axis) whose size is the symbol."""
        source = self.size_sources.get(symbol)
        return self.parent.size_source(symbol) if source is None and self.parent else source

    def size(self, symbol: str) -> str:
        """Return the name of an int64[1] that holds the symbol's size."""
        if symbol in self.size_names:
            return self.size_names[symbol]
        source = self.size_source(symbol)
        if source is None:
            raise InvalidInput(
                f"no value in scope of {self.function.name!r} has the bare dimension {symbol}, so "
                "its size cannot be read; give one parameter that dimension"
            )
        self.size_names[symbol] = self.emit("Shape", source[0], start=source[1], end=source[1] + 1)
        return self.size_names[symbol]

    def dims(self, dims: Sequence[Dim]) -> str:
        """Emit an int64 vector of sizes; return its name."""
        return emit_dims(self, dims)


class _Located(Emitter):
    """Names every node and remembers which IR node it belongs to."""

    def __init__(
        self,
        target: OnnxTarget,
        function: Function,
        held: Mapping[str, EmittedInitializer],
        parent: _Located | None = None,
    ) -> None:
        super().__init__(target, function, held, parent)
        self.places: dict[str, Node] = parent.places if parent else {}
        self._for: Node | None = None
        self._inside = 0

    def node(self, node: Node) -> None:
        """See `Emitter.node`."""
        # A node from a body belongs to the node of the row that was inlined.
        if not self._inside:
            self._for = node
        super().node(node)

    def inline(self, node: Node, meaning: Function) -> None:
        """See `Emitter.inline`; a custom operator's nodes have places of their own."""
        self._inside += 1
        super().inline(node, meaning)
        self._inside -= 1

    def child(self, function: Function) -> Emitter:
        """See `Emitter.child`."""
        return _Located(self.target, clean(function), {}, self)

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """See `Emitter.add`."""
        super().add(op, inputs, outputs, **attrs)
        self.nodes[-1].name = f"at/{len(self.places)}"
        if self._for is not None:
            self.places[self.nodes[-1].name] = self._for


def _output_names(function: Function) -> list[str]:
    params = set(function.param_names)
    return [next_name(n) if n in params else n for n in function.result_names]


def _users_names(function: Function) -> frozenset[str]:
    """Return the names of inputs and outputs; refuse one that would name two values."""
    names = [*function.param_names, *_output_names(function)]
    twice = sorted(n for n, times in Counter(names).items() if times > 1)
    if twice:
        raise InvalidInput(
            f"{twice[0]!r} of {function.name!r} would name two values of the ONNX graph, in which "
            f"NAME:next is the new value of the parameter NAME; rename one"
        )
    return frozenset(names)


def _domains(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the domains of nodes and of those in their subgraphs."""
    domains = set()
    for node in nodes:
        domains.add(node.domain)
        for attribute in node.attribute:
            domains |= _domains(attribute.g.node)
    return domains


def _region_names(node: NodeProto) -> list[str]:
    """Return the names read inside a node's subgraphs."""
    names = []
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names += [*inner.input, *_region_names(inner)]
    return names


def _info(name: str, t: TensorType) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=type_proto(t))


def held_tensor(param: Value, held: EmittedInitializer) -> TensorProto:
    """Return the initializer for a parameter that the model holds."""
    if held.external is None:
        return numpy_helper.from_array(np.asarray(held.array, order="C"), param.name)
    tensor = TensorProto(
        name=param.name, data_type=param.type.dtype.onnx, dims=list(held.array.shape)
    )
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (
        # ONNX's external_data holds strings only.
        ("location", WEIGHTS_FILE),
        ("offset", str(held.external.offset)),
        ("length", str(held.external.length)),
    ):
        tensor.external_data.add(key=key, value=value)
    return tensor
