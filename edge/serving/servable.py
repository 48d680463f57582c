"""The interface of a served model, and the contract for its requests.

The server knows `Servable` and no files; `bundles.py` adapts a bundle to it. The `Contract` of a
servable is read when it is loaded, and refuses models that no request could use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from triplane.edge.serving.datatypes import Datatype, datatype_of
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.runtime.session import CancellationToken
from triplane.unified_ir.runtime.signature import UNNAMED

Array = NDArray[Any]


class ServableTensor(Protocol):
    """One input or output."""

    @property
    def name(self) -> str:
        """The name, unique among inputs or outputs."""

    @property
    def dtype(self) -> str:
        """Numpy dtype name, such as `float32`."""

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Sizes and symbols; a symbol stands for the same size within a run."""


class Servable(Protocol):
    """A loaded model. `run` is called from many threads at once.

    name, version: as in requests. inputs: every request has them; outputs: it may ask for them.
    labels: class names by output, in class order, for outputs that have them.
    """

    name: str
    version: str
    inputs: Sequence[ServableTensor]
    outputs: Sequence[ServableTensor]
    labels: Mapping[str, Sequence[str]]

    def run(
        self, feeds: Mapping[str, Array], *, stop: CancellationToken | None = None
    ) -> dict[str, Array]:
        """Return all outputs by name. InvalidInput: wrong feeds. Unavailable: `stop` was set."""


@dataclass(frozen=True, slots=True)
class TensorContract:
    """One checked input or output."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]

    @property
    def wire_shape(self) -> list[int]:
        """The shape in metadata, with -1 for sizes that the request decides."""
        return [size if isinstance(size, int) else -1 for size in self.shape]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One output of a response; with `classes` > 0, as many top classes instead."""

    spec: TensorContract
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Contract:
    """Inputs and outputs of one servable by name, and its row symbol.

    rows: the symbol that is the first dimension of every input. If it is None, a request has one
    row, and requests cannot be merged.
    """

    inputs: dict[str, TensorContract]
    outputs: dict[str, TensorContract]
    rows: str | None
    all_outputs: tuple[Wanted, ...]

    @property
    def mergeable(self) -> bool:
        """Whether every output also has one row per row of input."""
        return self.rows is not None and all(
            spec.shape[:1] == (self.rows,) for spec in self.outputs.values()
        )


def contract_of(servable: Servable) -> Contract:
    """Return the contract of a servable. InvalidInput names the first invalid tensor."""
    inputs, outputs = _specs(servable.inputs), _specs(servable.outputs)
    if not inputs or not outputs:
        raise InvalidInput(f"model {servable.name!r} needs at least one input and one output")
    firsts = {spec.shape[0] if spec.shape else 1 for spec in inputs.values()}
    rows = firsts.pop() if len(firsts) == 1 else None
    named = isinstance(rows, str) and rows != UNNAMED
    return Contract(
        inputs, outputs, str(rows) if named else None, tuple(map(Wanted, outputs.values()))
    )


def _specs(tensors: Sequence[ServableTensor]) -> dict[str, TensorContract]:
    specs: dict[str, TensorContract] = {}
    for tensor in tensors:
        if tensor.name in specs:
            raise InvalidInput(f"tensor name {tensor.name!r} occurs twice; names are unique")
        specs[tensor.name] = TensorContract(tensor.name, datatype_of(tensor.dtype), tensor.shape)
    return specs
