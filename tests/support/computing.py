"""Results of operators on arrays, without a cell around them."""

from triplane.unified_ir import TensorSpec
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE


def computed(body, *arrays, engine_name="onnx"):
    """Record `body` over the arrays as a graph, and return its result by the engine."""
    build = Build(TABLE, "f")
    with build:
        params = [build.param(f"x{i}", TensorSpec(a.shape, a.dtype)) for i, a in enumerate(arrays)]
        y = body(*params)
    return engine(engine_name).compile(build.finish({"y": y}))(*arrays)[0]
