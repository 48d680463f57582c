"""Small ONNX networks as other frameworks write them, with random weights."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class Writer:
    """Nodes and initializers of one graph."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.held = [], []

    def weight(self, name, *shape, scale=0.3, mean=0.0):
        array = (mean + scale * self.rng.standard_normal(shape)).astype(np.float32)
        return self.constant(name, array)

    def constant(self, name, array):
        self.held.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op, *inputs, name=None, outputs=None, **attrs):
        out = outputs or [name or f"{op.lower()}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), out, name=f"/{out[0]}", **attrs))
        return out[0]

    def conv_bn(self, x, name, inputs, outputs, stride=1, kernel=3):
        w = self.weight(f"{name}.conv.weight", outputs, inputs, kernel, kernel)
        pad = kernel // 2
        y = self.add("Conv", x, w, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
        scale = self.weight(f"{name}.bn.weight", outputs, scale=0.1, mean=1.0)
        stats = [
            scale,
            self.weight(f"{name}.bn.bias", outputs),
            self.weight(f"{name}.bn.running_mean", outputs),
            self.constant(f"{name}.bn.running_var", self.rng.uniform(0.5, 2, outputs).astype("f4")),
        ]
        return self.add("BatchNormalization", y, *stats)

    def graph(self, outputs):
        """A graph that is an attribute: what it reads from outside has no inputs."""
        return helper.make_graph(self.nodes, "inner", [], [info(*o) for o in outputs], self.held)

    def model(self, inputs, outputs, opset=OPSET, **more):
        infos = [info(*i) for i in inputs]
        graph = helper.make_graph(self.nodes, "net", infos, [info(*o) for o in outputs], self.held)
        imports = [helper.make_opsetid("", opset), *more.pop("imports", ())]
        return helper.make_model(graph, opset_imports=imports, ir_version=8, **more)


def info(name, dtype, shape):
    return helper.make_tensor_value_info(name, dtype, shape)


def resnet(classes=5, opset=OPSET):
    """Two residual blocks of the shape of ResNet-18, over (N, 3, 16, 16)."""
    w = Writer()
    x = w.add("Relu", w.conv_bn("image", "stem", 3, 8))
    x = w.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for name, inputs, outputs, stride in (("layer1", 8, 8, 1), ("layer2", 8, 16, 2)):
        y = w.add("Relu", w.conv_bn(x, f"{name}.a", inputs, outputs, stride))
        y = w.conv_bn(y, f"{name}.b", outputs, outputs)
        short = x if stride == 1 else w.conv_bn(x, f"{name}.down", inputs, outputs, stride, 1)
        x = w.add("Relu", w.add("Add", y, short))
    flat = w.constant("flat", np.array([0, -1]))
    x = w.add("Reshape", w.add("GlobalAveragePool", x), flat, name="features")
    head = w.weight("fc.weight", classes, 16), w.weight("fc.bias", classes)
    w.add("Gemm", x, *head, name="logits", transB=1)
    shapes = ["N", 3, 16, 16], ["N", classes]
    return w.model(
        [("image", TensorProto.FLOAT, shapes[0])], [("logits", TensorProto.FLOAT, shapes[1])], opset
    )


def language_model(transposed=True):
    """An embedding whose table is the weight of the output, too, as exporters write it: twice."""
    w = Writer()
    w.weight("wte", 60, 20)
    table = numpy_helper.to_array(w.held[0])
    w.constant("head", np.ascontiguousarray(table.T) if transposed else table)
    x = w.add("MatMul", w.add("Gather", "wte", "ids"), w.weight("h.weight", 20, 20))
    head = "head" if transposed else w.add("Transpose", "head", perm=[1, 0])
    w.add("MatMul", w.add("Tanh", x), head, name="scores")
    inputs, outputs = (
        [("ids", TensorProto.INT64, ["N", "T"])],
        [("scores", TensorProto.FLOAT, ["N", "T", 60])],
    )
    return w.model(inputs, outputs)
