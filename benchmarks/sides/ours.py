"""Triplane's side: the whole step as one graph on the onnx engine, one thread."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import networks
from benchmarks.sides.worker import Step, serve

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.frontend import Cell, Parameter, trace
from triplane.unified_ir.ir import Function, TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.runtime import session


class Layer(Cell):
    """A weight and a bias."""

    def __init__(self, layer: networks.Layer, weight: networks.Array, bias: networks.Array) -> None:
        super().__init__()
        self.layer = layer
        self.weight, self.bias = Parameter(weight), Parameter(bias)

    def construct(self, x: Any) -> Any:
        """The layer without what follows a last one."""
        if isinstance(self.layer, networks.Conv):
            y = ops.conv(x, self.weight, self.bias, padding=self.layer.padding)
            return ops.max_pool(ops.relu(y), 2)
        return ops.linear(ops.flatten(x) if x.rank > 2 else x, self.weight, self.bias)


class Network(Cell):
    """The case's layers and the mean cross entropy of their logits."""

    def __init__(self, case: networks.Case) -> None:
        super().__init__()
        held = networks.weights(case)
        made = []
        for i, layer in enumerate(case.layers):
            made.append(Layer(layer, held[f"{i}.weight"], held[f"{i}.bias"]))
        self.layers = made

    def construct(self, x: Any, labels: Any) -> Any:
        """x: (B, ...), labels: (B,) -> the mean loss."""
        for cell in self.layers[:-1]:
            x = cell(x)
            x = ops.relu(x) if isinstance(cell.layer, networks.Dense) else x
        return {"loss": ops.cross_entropy(self.layers[-1](x), labels).mean()}


def with_update(gradients: Function, case: networks.Case, names: list[str]) -> Function:
    """Adds SGD as PyTorch defines it: v <- momentum v + g; w <- w - lr v."""
    build = Build(TABLE, "train_step")
    with build:
        params = [build.param(p.name, p.type) for p in gradients.params]
        by_name = dict(zip(gradients.param_names, params, strict=True))
        found = dict(zip(gradients.result_names, inline(gradients, params), strict=True))
        results = {"loss": found["loss"]}
        for name in names:
            g = found[f"grad.{name}"]
            if case.momentum:
                velocity = f"velocity.{name}"
                g = results[velocity] = build.param(velocity, g.type) * case.momentum + g
            results[name] = by_name[name] - g * case.lr
    return build.finish(results)


def train_step(case: networks.Case) -> tuple[Function, dict[str, networks.Array], dict[str, float]]:
    """The step's function, its state, and how long recording and differentiating took."""
    start = time.process_time()
    network = Network(case)
    specs = TensorSpec(case.shape, "float32"), TensorSpec((case.batch,), "int64")
    forward = trace(network, *specs)
    traced = time.process_time()
    state = {k: p.array for k, p in network.parameters().items()}
    function = with_update(value_and_grad(forward, list(state)), case, list(state))
    if case.momentum:
        state |= {f"velocity.{k}": x * 0 for k, x in state.items()}
    times = {"trace_s": traced - start, "grad_s": time.process_time() - traced}
    return function, state, times


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    function, state, times = train_step(case)
    start = time.process_time()
    loop = OnnxEngine().compile(function, donate=tuple(state)).loop(state)
    times["compile_s"] = time.process_time() - start

    def step(x: networks.Array, labels: networks.Array) -> float:
        return float(loop.step(x=x, labels=labels)["loss"])

    return step, {"version": f"onnxruntime {session.version()}", **times}


if __name__ == "__main__":
    serve(side)
