"""Saving reads back what it wrote, the whole way a reader would, before it says that it is done."""

import pytest
from tests.ir import graphs

from triplane.proto.errors import Corrupt
from triplane.unified_ir import TensorSpec, load, save
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Function, Node, OpId, Value


def false_claim():
    """A module whose only node claims a shape that its operator does not give."""
    x = Value(TensorSpec(("N", 3)), "x")
    y = Value(TensorSpec(("N", 4)))
    node = Node(OpId("", "Relu", 14), (x,), (y,))
    return Module({"f": Function("f", (x,), (y,), ("y",), (node,))}, {"predict": "f"}, {})


def test_a_model_file_is_loaded_before_saving_returns(tmp_path):
    digest = save(graphs.module(), tmp_path / "m.tpm")
    assert load(tmp_path / "m.tpm", digest).entries.keys() == {"predict", "train_step"}


def test_a_module_that_no_reader_takes_is_not_left_under_its_name(tmp_path):
    path = tmp_path / "m.tpm"
    old = save(graphs.module(), path)
    with pytest.raises(Corrupt, match=r"m\.tpm .*not kept.*function 'f': node 0 \(Relu\): claims"):
        save(false_claim(), path)
    load(path, old)
    assert [p.name for p in tmp_path.iterdir()] == ["m.tpm"]
