"""Int8 products give the same answers on processors whose sums of two products saturate.

The processor is emulated by QEMU, which has the instructions of an x64 processor without VNNI.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from triplane.unified_ir.runtime import session

ROOT = Path(__file__).parents[2]
QEMU = "qemu-x86_64"
WITHOUT_VNNI = "Haswell"


def product_model(*, shared):
    """Two layers of weights at the ends of int8, with one zero point for both or one for each."""
    array = numpy_helper.from_array
    constants = {"s": np.float32(2 / 255), "z": np.uint8(128), "sw": np.full(16, 0.05, np.float32)}
    nodes, x = [], "x"
    for k in (1, 2):
        signs = np.where(np.random.default_rng(k).random((16, 16)) < 0.7, 1, -1)
        constants[f"w{k}"] = (signs * 127).astype(np.int8)
        constants[f"zero{1 if shared else k}"] = np.zeros(16, np.int8)
        zero = f"zero{1 if shared else k}"
        nodes += [
            helper.make_node("QuantizeLinear", [x, "s", "z"], [f"q{k}"]),
            helper.make_node("DequantizeLinear", [f"q{k}", "s", "z"], [f"x{k}"]),
            helper.make_node("DequantizeLinear", [f"w{k}", "sw", zero], [f"d{k}"], axis=1),
            helper.make_node("MatMul", [f"x{k}", f"d{k}"], [f"p{k}"]),
            helper.make_node("Tanh", [f"p{k}"], [f"y{k}" if k == 1 else "y"]),
        ]
        x = f"y{k}"
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 16])],
        [array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, shared in {"apart": False, "shared": True}.items():
        model = product_model(shared=shared)
        (folder / name).write_bytes(model.SerializeToString())
    return folder


def answers(models, *emulator):
    command = [*emulator, sys.executable, "-m", "tests.runtime.int8_sums", str(models)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / '.ci' / 'namespace'}:{ROOT}"}
    done = subprocess.run(
        [*command, "apart", "shared"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def emulator():
    """The command that runs a program of this machine on a processor without VNNI."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulated processor is an x64 one, and so must be this machine's programs")
    if shutil.which(QEMU) is None:
        required = "emulator" in os.environ.get("TRIPLANE_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)(f"no {QEMU} on this machine")
    return QEMU, "-cpu", WITHOUT_VNNI


def close(y, model):
    """Rounding of the second layer's input may differ by one step, hence the tolerance."""
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    (wanted,) = ReferenceEvaluator(onnx.load(model)).run(None, {"x": x})
    return np.allclose(y, wanted, atol=0.02)


def test_sums_are_exact_here(models):
    here = answers(models)
    assert all(close(here[name], models / name) for name in ("apart", "shared"))


@pytest.mark.slow
def test_sums_are_exact_where_the_processor_adds_two_products_in_16_bits(models):
    there = answers(models, *emulator())
    assert there["saturates"]
    assert close(there["apart"], models / "apart")
    assert close(there["shared"], models / "shared")


def test_the_question_to_the_processor_is_one_product():
    model = onnx.load_model_from_string(session._PRODUCT)
    onnx.checker.check_model(model, full_check=True)
    (node,) = model.graph.node
    assert (node.op_type, list(node.input)) == ("MatMulInteger", ["x", "w"])
