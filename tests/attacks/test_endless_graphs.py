"""Graphs without an end, for every caller or for some shapes: what loads them comes back.

A bundle may answer its goldens and run for ever on another number of rows, so the trial lets it
pass; the server tries such numbers itself, and must be able to load something else afterwards.
"""

import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.runtime.samples import bundle_spec

from triplane.edge.serving import probe
from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.repository import Repository
from triplane.proto.errors import Corrupt
from triplane.unified_ir.runtime import write_bundle


def loop_body():
    """One more turn, whatever came before."""
    info, boolean = helper.make_tensor_value_info, TensorProto.BOOL
    return helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["again"]),
            helper.make_node("Add", ["so_far", "so_far"], ["further"]),
        ],
        "turn",
        [
            info("turn", TensorProto.INT64, []),
            info("more", boolean, []),
            info("so_far", TensorProto.FLOAT, []),
        ],
        [info("again", boolean, []), info("further", TensorProto.FLOAT, [])],
    )


def endless_for(rows):
    """The classifier of the samples, but that it never answers so many rows."""
    graph = onnx.load_from_string(bundle_spec().model)
    (last,) = [node for node in graph.graph.node if "y" in node.output]
    last.output[:] = ["answer"]
    constants = {
        "rows": np.array([rows], np.int64), "first": np.array([0]), "next": np.array([1]),
        "once": np.array(1), "ever": np.array(2**62), "yes": np.array(True),
        "nothing": np.array(0, np.float32),
    }  # fmt: skip
    graph.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in constants.items())
    node = helper.make_node
    graph.graph.node.extend(
        [
            node("Shape", ["x"], ["shape"]),
            node("Slice", ["shape", "first", "next"], ["count"]),
            node("Equal", ["count", "rows"], ["is_asked"]),
            node("Squeeze", ["is_asked"], ["asked"]),
            node("Where", ["asked", "ever", "once"], ["turns"]),
            node("Loop", ["turns", "yes", "nothing"], ["waste"], body=loop_body()),
            node("Add", ["answer", "waste"], ["y"]),
        ]
    )
    return graph.SerializeToString()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(probe, "WARM_S", 0.3)
    monkeypatch.setattr(probe, "TRIES_S", 0.3)


@pytest.fixture
def repository():
    made = Repository(probe.plan)
    yield made
    made.close()


def bundle(tmp_path, rows):
    write_bundle(tmp_path / f"{rows}.bundle", bundle_spec(model=endless_for(rows)))
    return open_bundle(tmp_path / f"{rows}.bundle")


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_graph_that_never_ends_for_some_rows_is_served_but_not_merged(
    tmp_path, repository, impatient, rows
):
    started = time.monotonic()
    version = repository.switch(bundle(tmp_path, rows))
    assert time.monotonic() - started < 10.0
    assert version.runner.merged_rows == 0
    repository.switch(bundle(tmp_path, 99))


def test_a_graph_that_never_ends_for_one_row_is_refused_and_the_next_one_loads(
    tmp_path, repository, impatient
):
    repository.switch(bundle(tmp_path, 99))
    with pytest.raises(
        Corrupt, match=r"'digits': a run of one generated row did not end within 0\.3 s"
    ):
        repository.switch(bundle(tmp_path, 1))
    assert [(e.version, e.state) for e in repository.index(ready_only=True)] == [("1.0", "READY")]
    repository.switch(bundle(tmp_path, 99))
