"""Explain a failed run by the user's node, its line and its operands.

onnxruntime names a node of its own optimized graph, in which nodes are fused and renamed. So the
graph is emitted again for the same target and run without optimization, with a name for every node
from which its source line is known. The operands of the node that fails come from a graph that ends
before it. All this happens only after a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from onnx import ModelProto, ValueInfoProto

from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.onnx.emit import emit_located, serialize
from triplane.unified_ir.onnx.target import OnnxTarget
from triplane.unified_ir.ops.evaluate import failure
from triplane.unified_ir.runtime.session import Loop, RunFailed, Session, SessionOptions

PLAIN: Final = SessionOptions(optimization="none")
_NAMED: Final = re.compile(r"Name:'(at/\d+)'")
_STATUS: Final = re.compile(r".*Status Message: ", re.DOTALL)
_CHECKED: Final = re.compile(r"^/\S+:\d+ .* was false\. ", re.DOTALL)
"""The location in onnxruntime's own source, which precedes the message."""


def explained(
    failed: RunFailed, function: Function, target: OnnxTarget, feeds: Mapping[str, Any]
) -> InvalidInput:
    """Return the failure with the user's line; unchanged if it does not happen again."""
    model, places = emit_located(function, target=target)
    try:
        Session(serialize(model), options=PLAIN).run(feeds)
    except RunFailed as error:
        again = str(error)
    except TriplaneError:
        return failed
    else:
        return failed
    names = _NAMED.findall(again)
    if not names or names[-1] not in places:
        return failed
    # The last name: errors of nodes in a region name the nodes around it first.
    node, why = places[names[-1]], _CHECKED.sub("", _STATUS.sub("", again))
    return RunFailed(failure(node, why, _operands(model, names[-1], feeds)))


def _operands(model: ModelProto, name: str, feeds: Mapping[str, Any]) -> list[Array | None]:
    """Return the node's operands if it is in the outer graph."""
    at = next((i for i, n in enumerate(model.graph.node) if n.name == name), None)
    if at is None:
        return []
    wanted = [i for i in model.graph.node[at].input if i]
    inputs = {i.name for i in model.graph.input}
    missing = [i for i in dict.fromkeys(wanted) if i not in inputs]
    head = ModelProto()
    head.CopyFrom(model)
    del head.graph.node[at:]
    del head.graph.output[:]
    head.graph.output.extend(ValueInfoProto(name=i) for i in missing)
    try:
        values = Session(serialize(head), options=PLAIN).run(feeds) if missing else {}
    except TriplaneError:
        return []
    return [values[i] if i in values else feeds[i] for i in wanted]


Explain = Callable[[RunFailed, Mapping[str, Any]], InvalidInput]


class ExplainingLoop(Loop):
    """A loop that explains a failed step; the state then stays as it was, as in `Loop`."""

    def __init__(self, session: Session, state: Mapping[str, Array], explain: Explain) -> None:
        super().__init__(session, state)
        self._explain = explain

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `Loop.step`."""
        try:
            return super().step(**batch)
        except RunFailed as failed:
            raise self._explain(failed, {**self.view(), **batch}) from failed
