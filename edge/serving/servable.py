"""The interface of a served model, and its fixed shape contract.

The server knows `Servable` and nothing of files; `bundles.py` adapts a bundle to it. `Contract`
is read from a servable once, at load, and refuses there what no request could ever use.
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
    """One input or output: numpy dtype name, and a shape of sizes and symbols."""

    @property
    def name(self) -> str:
        """Unique among its side."""

    @property
    def dtype(self) -> str:
        """Numpy dtype name, such as `float32`."""

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Sizes; a str is a symbol, and one symbol is one size within a run."""


class Servable(Protocol):
    """A loaded model. `run` is called from many threads at once."""

    @property
    def name(self) -> str:
        """Name that requests ask for."""

    @property
    def version(self) -> str:
        """Version that requests may ask for."""

    @property
    def inputs(self) -> Sequence[ServableTensor]:
        """Tensors that every request brings."""

    @property
    def outputs(self) -> Sequence[ServableTensor]:
        """Tensors that a request may ask for."""

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Class names by output, in class order; outputs without them are absent."""

    def run(
        self, feeds: Mapping[str, Array], *, stop: CancellationToken | None = None
    ) -> dict[str, Array]:
        """All outputs by name.

        InvalidInput: the feeds are at fault. Unavailable: `stop` was set.
        """


@dataclass(frozen=True, slots=True)
class TensorContract:
    """One checked input or output."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]

    @property
    def wire_shape(self) -> list[int]:
        """Shape as metadata says it: -1 where the request decides."""
        return [size if isinstance(size, int) else -1 for size in self.shape]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One output of a response; `classes` > 0 asks for that many top classes instead."""

    spec: TensorContract
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Contract:
    """Inputs and outputs of one servable by name, and its row symbol.

    `rows` is the symbol that is the first dimension of every input, or None: then a request has
    one row and requests cannot be merged.
    """

    inputs: dict[str, TensorContract]
    outputs: dict[str, TensorContract]
    rows: str | None
    all_outputs: tuple[Wanted, ...]

    @property
    def mergeable(self) -> bool:
        """Whether every output, too, has one row per row of input."""
        return self.rows is not None and all(
            spec.shape[:1] == (self.rows,) for spec in self.outputs.values()
        )


def contract_of(servable: Servable) -> Contract:
    """Read and check a servable's tensors. Raises InvalidInput naming the first bad one."""
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
