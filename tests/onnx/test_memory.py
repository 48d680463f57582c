"""How much memory an import takes: about the weights once, wherever they lie."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from triplane.unified_ir import load

MIB = 1 << 20
SIDE = 2560
LAYERS = 6
WAIT_S = 300
CHILD = """
import sys
from triplane.unified_ir.cli.shell import run
code = run(["import", sys.argv[1], "--out", sys.argv[2]])
peak = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(code, peak.split()[1])
"""


def network(path, side, layers):
    """Products by square weights that lie in one file beside the model; the file's bytes."""
    rng = np.random.default_rng(0)
    held, nodes, x = [], [], "x"
    with path.with_suffix(".bin").open("wb") as file:
        for i in range(layers):
            tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[side, side])
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": file.name.rpartition("/")[2], "offset": file.tell()}
            for key, value in (entries | {"length": 4 * side * side}).items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(rng.standard_normal((side, side), np.float32).tobytes())
            held.append(tensor)
            nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"y{i}"]))
            x = f"y{i}"
        size = file.tell()
    infos = [helper.make_tensor_value_info(n, 1, ["N", side]) for n in ("x", x)]
    graph = helper.make_graph(nodes, "net", infos[:1], infos[1:], held)
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return size


def peak_bytes(model, out):
    """The most memory that a process of its own had while it imported."""
    command = [sys.executable, "-c", CHILD, str(model), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    code, peak = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    return int(peak) << 10


@pytest.mark.long
def test_an_import_takes_about_the_memory_of_the_weights_once(tmp_path):
    small = network(tmp_path / "small.onnx", 16, 1)
    large = network(tmp_path / "large.onnx", SIDE, LAYERS)
    assert large > 140 * MIB
    before = peak_bytes(tmp_path / "small.onnx", tmp_path / "small.tpm")
    peak = peak_bytes(tmp_path / "large.onnx", tmp_path / "large.tpm")
    ratio = (peak - before) / (large - small)
    assert ratio < 1.4, f"{peak / MIB:.0f} MiB, {before / MIB:.0f} MiB for almost no weights"
    held = load(tmp_path / "large.tpm").state["w3"].array
    begin = 3 * 4 * SIDE * SIDE
    data = np.fromfile(tmp_path / "large.bin", np.float32, SIDE * SIDE, offset=begin)
    np.testing.assert_array_equal(held.reshape(-1), data)
