"""ONNX models as text, and the check that an import computes what they do."""

import numpy as np
import onnxruntime as ort
from onnx import parser

from triplane.unified_ir import import_onnx
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize


def text_model(body, opset=17, functions=""):
    """A model from ONNX's own text form."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]>'
    return parser.parse_model(f"{head}\n{body}\n{functions}")


def original(model, **feeds):
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


def emitted(module, **feeds):
    held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
    made = serialize(emit(module.entry("predict"), initializers=held))
    return ort.InferenceSession(made).run(None, feeds)


def agree(model, **feeds):
    """The imported model gives what the original does; the module."""
    module = import_onnx(model)
    for found, wanted in zip(emitted(module, **feeds), original(model, **feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return module


BRANCHES = """
agraph (float[N,4] x, bool c) => (float[N,4] y) {
  y = If (c) <
    then_branch = yes () => (float[N,4] a) <float[4,4] w = {
      1,2,3,4, 5,6,7,8, 9,1,2,3, 4,5,6,7}> { a = MatMul(x, w) },
    else_branch = no () => (float[N,4] b) <float[4] w = {1,2,3,4}> { b = Add(x, w) }
  >
}"""
LOOP = """
agraph (float[N,4] x, int64 n) => (float[N,4] y, float[T,N,4] rows) {
  go = Constant <value = bool {1}> ()
  y, rows = Loop (n, go, x) <body = step (int64 i, bool was, float[N,4] h)
      => (bool on, float[N,4] after, float[N,4] row) <float[4] scale = {1.5, 0.5, 2, 1}> {
        on = Identity(was)
        after = Mul(h, scale)
        row = Sub(after, x)
      }>
}"""
SCAN = """
agraph (float[4] h, float[T,4] xs) => (float[4] last, float[T,4] ys) {
  last, ys = Scan <num_scan_inputs = 1, scan_input_directions = [1],
    body = step (float[4] s, float[4] v) => (float[4] t, float[4] o)
      <float[4] bias = {0.5, 1, 1.5, 2}> {
        u = Add(s, v)
        t = Add(u, bias)
        o = Identity(t)
      }> (h, xs)
}"""
