import threading
from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.runtime.graphs import counting, external, linear, model, sgd_step

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.runtime import session
from triplane.unified_ir.runtime.session import (
    CancellationToken,
    Session,
    SessionOptions,
    available_providers,
)
from triplane.unified_ir.runtime.signature import TensorInfo, next_name

node = helper.make_node


def test_signature_shows_names_dtypes_symbols_and_sizes():
    session = Session(linear())
    assert session.inputs == (TensorInfo("x", "float32", ("N", 2)),)
    assert session.outputs == (TensorInfo("y", "float32", ("N", 2)),)


def test_run_returns_outputs_by_name_and_only_those_asked_for():
    nodes = [node("Neg", ["x"], ["a"]), node("Abs", ["x"], ["b"])]
    session = Session(model(nodes, {"x": ("N",)}, {"a": ("N",), "b": ("N",)}))
    x = np.array([1, -2], np.float32)
    assert {name: list(v) for name, v in session.run({"x": x}).items()} == {
        "a": [-1, 2],
        "b": [1, 2],
    }
    assert list(session.run({"x": x}, ("b",))) == ["b"]
    with pytest.raises(InvalidInput, match=r"outputs must be some of \['a', 'b'\], not \['c'\]"):
        session.run({"x": x}, ("c",))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"missing \['x'\]"),
        ({"x": np.zeros((1, 2), np.float32), "z": np.zeros(1)}, r"unknown \['z'\]"),
        ({"x": np.zeros((1, 2))}, r"x: float32\(N, 2\), got float64\(1, 2\)"),
        ({"x": np.zeros((1, 2), ">f4")}, "got >f4"),
        ({"x": np.zeros(2, np.float32)}, r"x: float32\(N, 2\), got float32\(2,\)"),
        ({"x": np.zeros((1, 3), np.float32)}, r"x: float32\(N, 2\), got float32\(1, 3\)"),
    ],
)
def test_wrong_feeds_are_named_before_the_graph_runs(feeds, message):
    with pytest.raises(InvalidInput, match=message):
        Session(linear()).run(feeds)


def test_one_symbol_is_one_size_across_inputs():
    session = Session(sgd_step())
    feeds = {"w": np.zeros((2, 1)), "x": np.zeros((3, 2)), "y": np.zeros((4, 1))}
    with pytest.raises(InvalidInput, match="N is 3 in another input"):
        session.run({name: value.astype(np.float32) for name, value in feeds.items()})


def test_values_the_graph_cannot_take_are_invalid_input():
    table = np.zeros((3, 2), np.float32)
    graph = model(
        [node("Gather", ["table", "i"], ["y"])],
        {"i": ("N",)},
        {"y": ("N", 2)},
        {"table": table},
        types={"i": TensorProto.INT64},
    )
    with pytest.raises(InvalidInput, match="indices element out of data bounds"):
        Session(graph).run({"i": np.array([7])})


def test_a_stop_ends_a_run_that_would_never_end_and_the_session_goes_on():
    session, stop = Session(counting()), CancellationToken()
    x = np.zeros(1, np.float32)
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    with pytest.raises(Unavailable, match="stopped before it ended"):
        session.run({"trips": np.array(2**62), "x": x}, stop=stop)
    timer.join()
    assert session.run({"trips": np.array(3), "x": x}, stop=CancellationToken())["y"] == 3


def test_an_allocation_that_fails_is_an_error_and_no_line_on_standard_error(capfd):
    wide = model(
        [node("ConstantOfShape", ["n"], ["y"])],
        {"n": (1,)},
        {"y": ("M",)},
        types={"n": TensorProto.INT64},
    )
    session = Session(wide)
    for size in (2**62, 2**40, -1):
        with pytest.raises(InvalidInput, match="failed on these values"):
            session.run({"n": np.array([size])})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("junk", [b"junk", b"\x08\xff"])
def test_bytes_that_are_no_graph_are_corrupt(junk):
    with pytest.raises(Corrupt, match="refused the model"):
        Session(junk)


@pytest.mark.parametrize("name", ["xxxx", "yyyy", "NNNN", "prop"])
def test_names_that_are_no_text_are_corrupt(name):
    x, y = (helper.make_tensor_value_info(k, TensorProto.FLOAT, ["NNNN"]) for k in ("xxxx", "yyyy"))
    graph = helper.make_graph([helper.make_node("Neg", ["xxxx"], ["yyyy"])], "g", [x], [y])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"prop": "1"})
    data = made.SerializeToString()
    assert Session(data).metadata == {"prop": "1"}
    with pytest.raises(Corrupt, match="no text in UTF-8"):
        assert Session(data.replace(name.encode(), b"\xff\xfeab")).metadata


def test_graph_that_does_not_run_here_is_invalid_input():
    with pytest.raises(InvalidInput, match="Nope"):
        Session(model([node("Nope", ["x"], ["y"])], {"x": (1,)}, {"y": (1,)}))


def test_an_absent_file_has_its_own_family(tmp_path):
    with pytest.raises(NotFound, match=r"absent\.onnx"):
        Session(tmp_path / "absent.onnx")


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="this is the build for GPUs"
)
def test_a_gpu_without_its_build_of_onnxruntime_is_refused_with_the_way_to_get_it():
    with pytest.raises(
        Unavailable,
        match=r"has only .*CPUExecutionProvider; .* pip uninstall onnxruntime && pip install "
        "onnxruntime-gpu",
    ):
        Session(linear(), options=SessionOptions(device="cuda"))


def test_an_unknown_device_is_named_with_the_known_ones():
    with pytest.raises(InvalidInput, match="device must be one of 'cpu', 'cuda', got "):
        session.check_device("tpu")  # type: ignore[arg-type]


def test_a_session_that_runs_on_the_cpu_unasked_is_refused():
    # onnxruntime gives such a session where a provider's libraries do not load.
    opened = Session(linear())._ort
    session._refuse_fallback(opened, "cpu")
    with pytest.raises(Unavailable, match=r"not start on device 'cuda': .* would run on the CPU"):
        session._refuse_fallback(opened, "cuda")


def test_state_on_a_device_is_copied_when_it_is_read(monkeypatch):
    # The buffers of a GPU, in memory of the CPU that onnxruntime allocates.
    reads: list[str] = []

    class Counted(session.DeviceBuffer):
        def read(self):
            reads.append("read")
            return super().read()

    monkeypatch.setitem(session.BUFFERS, "cpu", partial(Counted, device=session._CPU))
    w, x = np.ones((2, 1), np.float32), np.ones((3, 2), np.float32)
    loop = Session(sgd_step()).loop({"w": w})
    loop.step(x=x, y=np.zeros((3, 1), np.float32))
    view = loop.view()
    assert (list(view), len(view), reads) == (["w"], 1, [])
    assert (view["w"] != w).all()
    assert len(reads) == 1
    with pytest.raises(KeyError):
        view["x"]


def external_add() -> bytes:
    weight = external("c", TensorProto.FLOAT, (64, 64), 0, 4 * 64 * 64)
    return model(
        [node("Add", ["x", "c"], ["y"])], {"x": (64, 64)}, {"y": (64, 64)}, external=[weight]
    )


def test_weights_fill_external_initializers_from_read_only_maps(tmp_path):
    path = tmp_path / "weights"
    np.arange(64 * 64, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=(64, 64))
    session = Session(external_add(), weights={"c": mapped})
    del mapped
    path.unlink()
    y = session.run({"x": np.zeros((64, 64), np.float32)})["y"]
    assert np.array_equal(y.ravel(), np.arange(64 * 64))


def test_weights_stay_right_when_the_caller_reuses_the_memory():
    c = np.ones((64, 64), np.float32)
    session = Session(external_add(), weights={"c": c})
    c[:] = 7
    assert (session.run({"x": np.zeros((64, 64), np.float32)})["y"] == 1).all()


@pytest.mark.parametrize(
    "weights",
    [
        {"c": np.ones((64, 63), np.float32)},
        {"c": np.ones((64, 64))},
        {"c": np.ones((64, 64), np.float32), "d": np.ones(1)},
        {"c": np.array(["text"])},
    ],
)
def test_weights_that_do_not_fit_the_graph_are_refused(weights):
    with pytest.raises(InvalidInput):
        Session(external_add(), weights=weights)


def test_graph_in_memory_reads_no_file(tmp_path, monkeypatch):
    np.zeros((64, 64), np.float32).tofile(tmp_path / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="does not exist"):
        Session(external_add())


def test_graph_on_disk_finds_its_weights_beside_it(tmp_path):
    (tmp_path / "model.onnx").write_bytes(external_add())
    np.full((64, 64), 3, np.float32).tofile(tmp_path / "weights.safetensors")
    session = Session(tmp_path / "model.onnx")
    assert (session.run({"x": np.zeros((64, 64), np.float32)})["y"] == 3).all()


def test_optimized_graph_and_profile_are_written_where_asked(tmp_path):
    options = SessionOptions(
        optimized_model_path=tmp_path / "optimized.onnx", profile_prefix=tmp_path / "profile"
    )
    session = Session(linear(), options=options)
    session.run({"x": np.ones((1, 2), np.float32)})
    assert (tmp_path / "optimized.onnx").stat().st_size
    assert session.profile().parent == tmp_path


def test_sessions_leave_the_callers_floating_point_mode_alone():
    tiny = np.full(4, 5e-324)
    session = Session(linear())
    session.run({"x": np.ones((1, 2), np.float32)})
    assert (tiny * 1.0 == tiny).all()
    assert tiny.any()


def test_disabled_optimizer_leaves_common_subexpressions_apart(tmp_path):
    nodes = [node("Exp", ["x"], ["a"]), node("Exp", ["x"], ["b"]), node("Mul", ["a", "b"], ["y"])]
    graph = model(nodes, {"x": ("N",)}, {"y": ("N",)})
    sizes = []
    for disabled in ((), ("CommonSubexpressionElimination",)):
        path = tmp_path / f"{len(disabled)}.onnx"
        Session(
            graph,
            options=SessionOptions(disabled_optimizers=disabled, optimized_model_path=path),
        )
        sizes.append(path.read_bytes().count(b"Exp"))
    assert sizes[0] < sizes[1]


def test_bfloat16_input_is_named_and_refused_at_run():
    graph = model(
        [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        {"x": (2,)},
        {"y": (2,)},
        types={"x": TensorProto.BFLOAT16},
    )
    session = Session(graph)
    assert session.inputs[0].dtype == "bfloat16"
    for dtype in (np.uint16, np.float64, np.float32):
        with pytest.raises(InvalidInput, match="cast inside the graph"):
            session.run({"x": np.zeros(2, dtype)})


def test_numbers_that_are_no_arrays_are_taken_by_their_own_dtype():
    graph = model([node("Neg", ["x"], ["y"])], {"x": ()}, {"y": ()}, types=dict.fromkeys("xy", 7))
    assert Session(graph).run({"x": 3})["y"] == -3  # type: ignore[dict-item] # on purpose
    with pytest.raises(InvalidInput, match="x: int64"):
        Session(graph).run({"x": np.float32(3)})  # type: ignore[dict-item] # on purpose


def over_text():
    return model(
        [node("Identity", ["x"], ["y"])],
        {"x": (1,)},
        {"y": (1,)},
        types=dict.fromkeys("xy", TensorProto.STRING),
    )


def test_graph_over_text_is_refused_at_load():
    with pytest.raises(InvalidInput, match=r"x must be a tensor of numbers, got tensor\(string\)"):
        Session(over_text())


def test_text_passes_where_any_value_may():
    session = Session(over_text(), options=SessionOptions(values="any"))
    assert session.run({"x": np.array(["é"], object)})["y"].tolist() == ["é"]
    with pytest.raises(InvalidInput, match="x: string"):
        session.run({"x": np.zeros(1, np.float32)})


def batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    return {"x": x, "y": x @ np.array([[1], [-2]], np.float32)}


def reference(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.float32]:
    e = x @ w - y
    return w - np.float32(0.2) * (x.T @ e) / np.float32(len(y)), (e * e).mean()


def test_loop_follows_the_reference_while_the_batch_changes_size():
    loop = Session(sgd_step()).loop({"w": np.zeros((2, 1), np.float32)})
    w = np.zeros((2, 1), np.float32)
    for i, rows in enumerate([4, 4, 7, 1, 32] * 8):
        fed = batch(rows, i)
        w, loss = reference(w, **fed)
        assert loop.step(**fed)["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
        np.testing.assert_allclose(loop.state()["w"], w, rtol=1e-4, atol=1e-6)


def test_loop_equals_run_bit_for_bit():
    session = Session(sgd_step())
    w = np.zeros((2, 1), np.float32)
    loop = session.loop({"w": w})
    for i in range(9):
        loop.step(**batch(8, i))
        w = session.run({"w": w, **batch(8, i)})[next_name("w")]
    assert np.array_equal(loop.state()["w"], w)


def test_outputs_of_a_step_outlive_later_steps():
    loop = Session(sgd_step()).loop({"w": np.zeros((2, 1), np.float32)})
    kept = [loop.step(**batch(4, i))["loss"] for i in range(5)]
    again = Session(sgd_step()).loop({"w": np.zeros((2, 1), np.float32)})
    assert [float(v) for v in kept] == [float(again.step(**batch(4, i))["loss"]) for i in range(5)]


def test_batch_may_be_strided_and_temporary():
    loop = Session(sgd_step()).loop({"w": np.zeros((2, 1), np.float32)})
    fed = batch(6)
    strided = {"x": np.asfortranarray(fed["x"]), "y": np.repeat(fed["y"], 2, axis=0)[::2]}
    w, loss = reference(np.zeros((2, 1), np.float32), **fed)
    assert loop.step(**strided)["loss"] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(loop.state()["w"], w, rtol=1e-5)


def swap() -> bytes:
    """a' = b, b' = a: any step that wrote where it reads would lose one of the two."""
    nodes = [node("Identity", ["b"], ["a:next"]), node("Identity", ["a"], ["b:next"])]
    shapes = {"a": (1000,), "b": (1000,)}
    return model(nodes, shapes, {f"{name}:next": shape for name, shape in shapes.items()})


def test_state_is_never_written_where_it_is_read():
    a, b = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    loop = Session(swap()).loop({"a": a, "b": b})
    for turn in range(1, 5):
        assert loop.step() == {}
        first, second = (a, b) if turn % 2 == 0 else (b, a)
        assert np.array_equal(loop.state()["a"], first)
        assert np.array_equal(loop.state()["b"], second)


def failing_step() -> bytes:
    """w' = w + table[i]: an index outside the table fails in the middle of a step."""
    nodes = [node("Gather", ["table", "i"], ["row"]), node("Add", ["w", "row"], ["w:next"])]
    return model(
        nodes,
        {"w": (2,), "i": ()},
        {"w:next": (2,)},
        {"table": np.ones((3, 2), np.float32)},
        types={"i": TensorProto.INT64},
    )


def test_step_that_raises_leaves_state_readable_and_loop_usable():
    loop = Session(failing_step()).loop({"w": np.zeros(2, np.float32)})
    loop.step(i=np.array(1))
    for bad in (np.array(9), np.array(1.0), np.array([1])):
        with pytest.raises(InvalidInput):
            loop.step(i=bad)
        assert list(loop.state()["w"]) == [1, 1]
    loop.step(i=np.array(2))
    assert list(loop.state()["w"]) == [2, 2]


def test_state_handed_out_and_in_is_a_copy():
    start = np.zeros(2, np.float32)
    loop = Session(failing_step()).loop({"w": start})
    start[:] = 5
    taken = loop.state()
    taken["w"][:] = 7
    loop.step(i=np.array(0))
    assert list(loop.state()["w"]) == [1, 1]


def test_load_replaces_named_state_or_nothing():
    loop = Session(swap()).loop({"a": np.zeros(1000, np.float32), "b": np.ones(1000, np.float32)})
    loop.step()
    loop.load({"a": np.full(1000, 3, np.float32)})
    assert (loop.state()["a"][0], loop.state()["b"][0]) == (3, 0)
    with pytest.raises(InvalidInput, match=r"b: float32\(1000\), got float64"):
        loop.load({"a": np.zeros(1000, np.float32), "b": np.zeros(1000)})
    with pytest.raises(InvalidInput, match=r"not \['c'\]"):
        loop.load({"a": np.zeros(1000, np.float32), "c": np.zeros(1)})
    assert loop.state()["a"][0] == 3
    loop.step()
    assert (loop.state()["a"][0], loop.state()["b"][0]) == (0, 3)


def test_state_without_a_new_value_stays():
    frozen = model([node("Add", ["w", "x"], ["y"])], {"w": (2,), "x": ("N", 2)}, {"y": ("N", 2)})
    loop = Session(frozen).loop({"w": np.array([1, 2], np.float32)})
    for _ in range(3):
        assert list(loop.step(x=np.ones((1, 2), np.float32))["y"][0]) == [2, 3]
    loop.load({"w": np.zeros(2, np.float32)})
    for _ in range(2):
        assert list(loop.step(x=np.ones((1, 2), np.float32))["y"][0]) == [1, 1]


@pytest.mark.parametrize(
    ("graph", "state", "message"),
    [
        (sgd_step(), {}, "output w:next updates state w"),
        (sgd_step(), {"v": np.zeros(2)}, r"\['v'\] are not"),
        (linear(), {"x": np.zeros((1, 2), np.float32)}, "static shape"),
        (sgd_step(), {"w": np.zeros(3, np.float32)}, r"w: float32\(2, 1\), got float32\(3,\)"),
    ],
)
def test_state_that_does_not_fit_the_graph_is_refused(graph, state, message):
    with pytest.raises(InvalidInput, match=message):
        Session(graph).loop(state)


def test_state_that_changes_type_is_refused():
    nodes = [node("Concat", ["w", "w"], ["w:next"], axis=0)]
    with pytest.raises(InvalidInput, match=r"w: float32\(2\) becomes w:next: float32\(4\)"):
        Session(model(nodes, {"w": (2,)}, {"w:next": (4,)})).loop({"w": np.zeros(2, np.float32)})
