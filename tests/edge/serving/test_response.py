import struct
import tracemalloc

import numpy as np
import pytest

from triplane.edge.serving.datatypes import datatype_of
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.response import encode, top_classes
from triplane.edge.serving.servable import TensorContract, Wanted
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput

Y = TensorContract("y", datatype_of("float32"), ("N", 3))


def text(entries):
    """Entries without their length prefix, which must be right."""
    for entry in entries:
        assert struct.unpack("<I", entry[:4]) == (len(entry) - 4,)
    return [entry[4:].decode() for entry in entries]


def test_classes_come_best_first_with_equal_scores_in_class_order():
    rows = np.array([[1, 3, 3], [2, 1, 0]], np.float32)
    assert text(top_classes(rows, 2, ())) == [
        "3.000000:1",
        "3.000000:2",
        "2.000000:0",
        "1.000000:1",
    ]


def test_labels_are_added_where_there_are_some():
    assert text(top_classes(np.array([[0, 1]]), 2, ("no",))) == ["1.000000:1", "0.000000:0:no"]


def test_nan_scores_come_last():
    rows = np.array([[np.nan, 1, -np.inf]], np.float32)
    assert [entry.split(":")[1] for entry in text(top_classes(rows, 3, ()))] == ["1", "2", "0"]


def test_the_least_integer_is_the_worst_class():
    rows = np.array([[-128, 127, 0]], np.int8)
    assert [entry.split(":")[1] for entry in text(top_classes(rows, 3, ()))] == ["1", "2", "0"]


def test_k_beyond_the_classes_gives_all_classes():
    response = pb.ModelInferResponse()
    encode(response, {"y": np.zeros((2, 3), np.float32)}, [Wanted(Y, 9)], {}, ServingLimits())
    assert [*response.outputs[0].shape] == [2, 3]
    assert response.outputs[0].datatype == "BYTES"


def test_an_output_of_one_dimension_is_one_row_of_classes():
    response = pb.ModelInferResponse()
    encode(response, {"y": np.zeros(5, np.float32)}, [Wanted(Y, 2)], {}, ServingLimits())
    assert [*response.outputs[0].shape] == [2]


def test_an_output_without_rows_has_no_classes():
    response = pb.ModelInferResponse()
    encode(response, {"y": np.zeros((0, 3), np.float32)}, [Wanted(Y, 2)], {}, ServingLimits())
    assert response.outputs[0].shape[0] == 0
    assert [*response.raw_output_contents] == [b""]


def test_too_many_classification_entries_are_refused():
    limits = ServingLimits(classification_entries=5)
    with pytest.raises(InvalidInput, match="2 rows by 3 classes; 5 entries"):
        encode(pb.ModelInferResponse(), {"y": np.zeros((2, 3))}, [Wanted(Y, 3)], {}, limits)


def test_an_answer_beyond_the_limit_is_refused_before_it_is_copied():
    huge = np.broadcast_to(np.float32(0), (1 << 20, 1 << 20))  # 4 TiB of one repeated value
    with pytest.raises(InvalidInput, match="send fewer rows"):
        encode(pb.ModelInferResponse(), {"y": huge}, [Wanted(Y)], {}, ServingLimits())


def test_an_array_in_another_memory_order_leaves_in_row_major_order():
    response = pb.ModelInferResponse()
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    encode(response, {"y": array}, [Wanted(Y)], {}, ServingLimits())
    assert np.frombuffer(response.raw_output_contents[0], "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_the_best_of_a_large_output_take_no_memory_of_its_size():
    rows = np.zeros((4096, 256), np.float32)
    tracemalloc.start()
    try:
        top_classes(rows, 1, ())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < rows.nbytes / 2
