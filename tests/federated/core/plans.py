"""Plans of a small linear learner, with one tensor of every role and rule a device must keep."""

import numpy as np
from onnx import TensorProto, helper
from tests.runtime.graphs import model

from triplane.unified_ir.federated.core.learn import Shard, Work
from triplane.unified_ir.runtime import Plan, PlanSpec, write_plan

WORK = Work(
    run="0123456789abcdef", round=3, device="ann", seed=7,
    steps=4, batch_size=5, support=4, query=3,
)  # fmt: skip
TYPES = {"key": TensorProto.UINT32, "key:next": TensorProto.UINT32}
ROLES = {
    "w": "parameter",
    "bias": "buffer",
    "anchor.w": "buffer",
    "hyper.lr": "buffer",
    "head": "personal",
    "key": "key",
}


def state(lr=0.1):
    return {
        "w": np.zeros((2, 1), np.float32),
        "bias": np.zeros((), np.float32),
        "anchor.w": np.zeros((2, 1), np.float32),
        "hyper.lr": np.full((), lr, np.float32),
        "head": np.zeros(2, np.float32),
        "key": np.zeros(2, np.uint32),
    }


def local_update(x="x", y="y", more=()) -> bytes:
    """One step of least squares on (x, y), pulled to the anchor; head counts steps."""
    node = helper.make_node
    nodes = [
        node("MatMul", [x, "w"], ["xw"]),
        node("Add", ["xw", "bias"], ["p"]),
        node("Sub", ["p", y], ["e"]),
        node("Mul", ["e", "e"], ["se"]),
        node("ReduceMean", ["se"], ["loss"], keepdims=0),
        node("Transpose", [x], ["xt"], perm=[1, 0]),
        node("MatMul", ["xt", "e"], ["g"]),
        node("Shape", [y], ["n64"], end=1),
        node("Cast", ["n64"], ["n"], to=TensorProto.FLOAT),
        node("Div", ["g", "n"], ["mean"]),
        node("Sub", ["w", "anchor.w"], ["far"]),
        node("Add", ["mean", "far"], ["pulled"]),
        node("Mul", ["pulled", "hyper.lr"], ["update"]),
        node("Sub", ["w", "update"], ["w:next"]),
        node("Add", ["bias", "hyper.lr"], ["bias:next"]),
        node("Add", ["head", "one"], ["head:next"]),
        node("BitShift", ["key", "bit"], ["key:next"], direction="RIGHT"),
    ]
    batch = {x: ("N", 2), y: ("N", 1), **dict.fromkeys(more, ("M", 2))}
    inputs = {"w": (2, 1), "bias": (), "anchor.w": (2, 1), "hyper.lr": (), "head": (2,)}
    outputs = {"loss": (), "w:next": (2, 1), "bias:next": (), "head:next": (2,), "key:next": (2,)}
    constants = {"one": np.ones((), np.float32), "bit": np.array(1, np.uint32)}
    return model(nodes, {**inputs, "key": (2,), **batch}, outputs, constants, types=TYPES)


def storing(tensor: str) -> bytes:
    """`local_update` that learns nothing and keeps its batch of 20 in a shared tensor."""
    nodes = [
        helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0),
        helper.make_node("Identity", ["x"], [f"{tensor}:next"]),
    ]
    inputs = {tensor: (20, 2), "x": (20, 2), "y": ("N", 1)}
    outputs = {"loss": (), f"{tensor}:next": (20, 2)}
    return model(nodes, inputs, outputs, types={"y": TensorProto.FLOAT})


def adapt() -> bytes:
    """w goes one tenth of the way to the mean of x, which a test can follow by hand."""
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["x", "axes"], ["m"], keepdims=0),
        node("Reshape", ["m", "column"], ["mc"]),
        node("Sub", ["mc", "w"], ["d"]),
        node("Mul", ["d", "tenth"], ["step"]),
        node("Add", ["w", "step"], ["w:next"]),
    ]
    constants = {
        "axes": np.array([0]), "column": np.array([2, 1]), "tenth": np.array(0.1, np.float32),
    }  # fmt: skip
    batch = {"x": ("N", 2), "y": ("N", 1)}
    return model(nodes, {"w": (2, 1), **batch}, {"w:next": (2, 1)}, constants)


def evaluate() -> bytes:
    """accuracy = share of samples with |x w - y| < 1/2."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Sub", ["p", "y"], ["e"]),
        node("Abs", ["e"], ["a"]),
        node("Less", ["a", "half"], ["near"]),
        node("Cast", ["near"], ["hit"], to=TensorProto.FLOAT),
        node("ReduceMean", ["hit"], ["accuracy"], keepdims=0),
    ]
    inputs = {"w": (2, 1), "x": ("N", 2), "y": ("N", 1)}
    return model(nodes, inputs, {"accuracy": ()}, {"half": np.array(0.5, np.float32)})


def predict() -> bytes:
    """p = x w."""
    node = helper.make_node("MatMul", ["x", "w"], ["p"])
    return model([node], {"w": (2, 1), "x": ("N", 2)}, {"p": ("N", 1)})


def spec(*, episodes=False, lr=0.1, **changes) -> PlanSpec:
    if episodes:
        learning = local_update("query.x", "query.y", more=("support.x",))
    else:
        learning = local_update()
    entries = {
        "local_update": learning, "adapt": adapt(), "evaluate": evaluate(), "predict": predict(),
    }  # fmt: skip
    return PlanSpec(**{"entries": entries, "state": state(lr), "roles": ROLES, **changes})


def plan(folder, **options) -> Plan:
    write_plan(folder / "learner.plan", spec(**options))
    return Plan.load(folder / "learner.plan")


def shard(n=20, held_out=6, seed=0) -> Shard:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + held_out, 2)).astype(np.float32)
    y = x @ np.array([[1.0], [-2.0]], np.float32)
    return Shard({"x": x[:n], "y": y[:n]}, {"x": x[n:], "y": y[n:]})


class Recording:
    """A plan that also notes what each entry was fed."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.fed: list = []
        self.entries, self.roles = plan.entries, plan.roles
        self.inputs, self.state, self.view, self.assign = (
            plan.inputs, plan.state, plan.view, plan.assign,
        )  # fmt: skip

    def run(self, entry, batch):
        self.fed.append((entry, batch))
        return self.plan.run(entry, batch)
