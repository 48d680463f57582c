"""An imported model as a cell: trained further, frozen in part, given another head."""

from __future__ import annotations

from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.tensor import Tensor


class Imported(Cell):
    """One entry of a module as a cell; its state keeps its names, roles and numbers.

    Weights are trained unless `freeze` says otherwise; running statistics are buffers and stay as
    they came, so batch normalization of an imported model goes on as in inference. Shapes follow
    the inputs: what the model leaves symbolic takes any size.

    >>> from triplane.unified_ir import import_onnx, nn
    >>> backbone = nn.Imported(import_onnx("resnet.onnx", outputs=["pooled"]))  # doctest: +SKIP
    >>> model = nn.Sequential(backbone.freeze("layer[12].*"), nn.Dense(512, 10))  # doctest: +SKIP
    """

    def __init__(self, module: Module, entry: str = "predict") -> None:
        super().__init__()
        self.function = module.entry(entry)
        assigned = module.assigned(entry)
        if assigned:
            raise InvalidInput(
                f"entry {entry!r} assigns {assigned[0]!r}; an imported cell computes, it keeps "
                "nothing: name an entry such as predict"
            )
        for name in self.function.param_names:
            if name in module.state:
                tensor = module.state[name]
                array: Array = tensor.array
                dtype = tensor.type.dtype
                self._parameters[name] = Parameter(array, role=tensor.role, dtype=dtype)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what the cell takes, in order."""
        return tuple(n for n in self.function.param_names if n not in self._parameters)

    def construct(self, *xs: Tensor) -> Any:
        """xs: the model's inputs in order -> its output, or a tuple of several."""
        if len(xs) != len(self.inputs):
            raise InvalidInput(
                f"the imported model takes {', '.join(self.inputs) or 'nothing'}; got {len(xs)}"
            )
        given = dict(zip(self.inputs, xs, strict=True))
        given |= {n: p.__tensor__() for n, p in self._parameters.items()}
        build = recorder()
        made = inline(self.function, [build.admit(given[n]) for n in self.function.param_names])
        return made[0] if len(made) == 1 else tuple(made)
