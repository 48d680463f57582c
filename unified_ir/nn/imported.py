"""An imported model as a cell: trained further, frozen in part, given another head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.ir.graph import Function, Node, Role, Value
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.nn.norm import batch_norm_step
from triplane.unified_ir.ops.inline import Replay, inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.arithmetic.norm import is_untrained
from triplane.unified_ir.ops.tensor import Tensor

BatchNormMode = Literal["kept", "updated"]
"""How batch normalization of an imported model behaves in training."""


class Imported(Cell):
    """One entry of a module as a cell; its state keeps its names, roles and values.

    Weights are trained unless `freeze` excludes them. batch_norm: "kept" normalizes by the running
    statistics of the model, in training too, which suits few or unusual samples; "updated" trains
    as `nn.BatchNorm2d` does: by the statistics of the batch, towards which the running ones move by
    the momentum of the model's nodes. Exporters often fold batch normalization into convolutions;
    then there is none to update, and "updated" is refused. Symbolic sizes of the model follow the
    inputs.

    >>> from triplane.unified_ir import import_onnx, nn
    >>> backbone = nn.Imported(import_onnx("resnet.onnx", outputs=["pooled"]))  # doctest: +SKIP
    >>> model = nn.Sequential(backbone.freeze("layer[12].*"), nn.Dense(512, 10))  # doctest: +SKIP
    """

    def __init__(
        self, module: Module, entry: str = "predict", *, batch_norm: BatchNormMode = "kept"
    ) -> None:
        super().__init__()
        check_choice("batch_norm", batch_norm, get_args(BatchNormMode))
        self.function = module.entry(entry)
        assigned = module.assigned(entry)
        if assigned:
            raise InvalidInput(
                f"entry {entry!r} assigns {assigned[0]!r}; an imported cell cannot assign state: "
                "name an entry such as predict"
            )
        for name in self.function.param_names:
            if name in module.state:
                tensor = module.state[name]
                # Stored directly: names such as `layer1.0.weight` contain dots and are no Python
                # attributes.
                self._parameters[name] = Parameter(
                    tensor.array, role=tensor.role, dtype=tensor.type.dtype
                )
        self.batch_norm = batch_norm
        # Exporters that merge equal tensors read one initializer through several Identity nodes.
        self._origins = _origins(self.function)
        if batch_norm == "updated":
            self._check_statistics()

    def _check_statistics(self) -> None:
        """Raise InvalidInput if running statistics are missing, or their layer is unknown."""
        layers: dict[str, list[tuple[Value | None, ...]]] = {}
        for node in self.function.nodes:
            names = self._statistics(node)
            for name in names or ():
                layers.setdefault(name, []).append(node.inputs[1:])
        if not layers:
            raise InvalidInput(
                "the model has no batch normalization with running statistics to update; exporters "
                "fold it into convolutions: export it unfolded (of PyTorch, dynamo=False with "
                'training=TrainingMode.PRESERVE), or leave batch_norm="kept"'
            )
        for name, sharing in layers.items():
            if len(sharing) > 1 and self._is_untrained(name):
                self._check_shared(name, sharing)

    def _check_shared(self, name: str, sharing: Sequence[tuple[Value | None, ...]]) -> None:
        """Raise InvalidInput unless one layer, known by its weights, is applied several times."""
        if len(set(sharing)) > 1:
            raise InvalidInput(
                f"different batch normalizations share the running statistics {name!r}; this "
                "version imports each with its own: import the ONNX file again, or leave "
                'batch_norm="kept"'
            )
        if all(v is not None and self._is_untrained(v.name) for v in sharing[0][:2]):
            raise InvalidInput(
                f"the running statistics {name!r} are read by {len(sharing)} batch normalizations "
                "whose scales, biases and statistics are all zeros or ones: one layer applied "
                f"{len(sharing)} times, or layers that a tool merged before any training. Export "
                "the network after a step of training, or without merging equal tensors, or leave "
                'batch_norm="kept"'
            )

    def _is_untrained(self, name: str) -> bool:
        parameter = self._parameters.get(name)
        return parameter is not None and is_untrained(parameter.array)

    def _statistics(self, node: Node) -> tuple[str, str] | None:
        """Return the names of the running mean and variance that a node normalizes by.

        InvalidInput: they are also weights, which training changes by gradients.
        """
        if node.op.name != "BatchNormalization" or len(node.outputs) > 1:
            return None
        read = node.inputs[3:5]
        mean, var = (self._origins.get(v, v).name if v is not None else "" for v in read)
        for name in (mean, var):
            if name not in self._parameters:
                return None
            if self._parameters[name].role is not Role.BUFFER:
                raise InvalidInput(
                    f"batch normalization {node.meta.scope!r} normalizes by "
                    f"{name!r}, which another node reads as a weight; export the network without "
                    'merging equal tensors, or leave batch_norm="kept"'
                )
        return mean, var

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the cell's inputs, in order."""
        return tuple(n for n in self.function.param_names if n not in self._parameters)

    def construct(self, *xs: Tensor) -> Any:
        """xs: the model's inputs in order -> its output, or a tuple of several."""
        if len(xs) != len(self.inputs):
            raise InvalidInput(
                f"the imported model takes {', '.join(self.inputs) or 'nothing'}; got {len(xs)}"
            )
        values = dict(zip(self.inputs, xs, strict=True))
        values |= {n: p.__tensor__() for n, p in self._parameters.items()}
        build = recorder()
        args = [build.as_operand(values[n]) for n in self.function.param_names]
        updates = self.training and self.batch_norm == "updated"
        results = self._updated(args) if updates else inline(self.function, args)
        return results[0] if len(results) == 1 else tuple(results)

    def _updated(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Return the results on batch statistics, and update the running ones."""
        replay = Replay(self.function, args)
        moved: dict[str, Tensor] = {}
        for node in self.function.nodes:
            names = self._statistics(node)
            if names is None:
                replay.run(node)
                continue
            # ONNX's momentum weighs the past, r <- m r + (1 - m) s, that of `batch_norm_step` (and
            # PyTorch) the new statistic. A layer that is applied twice goes on from the statistics
            # of its first application.
            x, scale, bias, mean, var = (t for t in replay.inputs(node) if t is not None)
            y, moved[names[0]], moved[names[1]] = batch_norm_step(
                x, scale, bias, moved.get(names[0], mean), moved.get(names[1], var),
                momentum=1.0 - _number(node, "momentum", 0.9),
                epsilon=_number(node, "epsilon", 1e-5),
            )  # fmt: skip
            replay.define(node, [y])
        for name, statistic in moved.items():
            setattr(self, name, statistic)
        return replay.results()


def _origins(function: Function) -> dict[Value, Value]:
    """Map each result of an Identity to the value it copies."""
    origins: dict[Value, Value] = {}
    for node in function.nodes:
        source = node.inputs[0] if node.op.name == "Identity" else None
        if source is not None:
            origins[node.outputs[0]] = origins.get(source, source)
    return origins


def _number(node: Node, name: str, default: float) -> float:
    value = node.attrs.get(name, default)
    assert isinstance(value, (int, float))
    return float(value)
