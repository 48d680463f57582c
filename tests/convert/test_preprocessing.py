"""The steps of a pipeline in front of a model: raw samples give what numpy and the model give."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import load_from_string
from tests.quantize import nets

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, ops
from triplane.unified_ir.convert import convert
from triplane.unified_ir.convert.preprocessing import (
    META_KEY,
    ONNX_FORMS,
    with_pipeline,
    with_preprocessing,
)
from triplane.unified_ir.data import arrays
from triplane.unified_ir.data.columns import Field, schema_of
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.registry import STEPS
from triplane.unified_ir.data.step import Step
from triplane.unified_ir.data.transforms import (
    Augmentation,
    Cast,
    CenterCrop,
    Clip,
    Concatenate,
    Drop,
    Erase,
    Flip,
    Jitter,
    Lookup,
    Noise,
    Normalize,
    OneHot,
    Pad,
    RandomCrop,
    Rename,
    Reshape,
    Resize,
    Scale,
    Select,
    Shift,
    Stack,
    Tokenize,
    Transpose,
)
from triplane.unified_ir.data.transforms.checks import DTYPES
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module
from triplane.unified_ir.quantize import artifact, freeze
from triplane.unified_ir.runtime import Bundle

RNG = np.random.default_rng(7)
N = 9
RAW: dict[str, Any] = {
    "image": RNG.integers(0, 256, (N, 3, 12, 10)).astype(np.uint8),
    "float": RNG.random((N, 2, 7, 6), dtype=np.float32),
    "class": RNG.integers(0, 5, N),
    "age": RNG.integers(0, 100, N).astype(np.float64) / 8,
    "codes": RNG.choice(np.array([3, 7, -20], np.int16), (N, 4)),
    "vector": RNG.normal(size=(N, 4)).astype(np.float32),
}


def prepared(steps, block):
    """What numpy computes, without the steps of training."""
    for step in steps:
        step.schema(schema_of(block))
        if not isinstance(step, Augmentation):
            block = step.apply(block, RowDraws(0, 0, 0, np.arange(N)))
    return block


def model_of(dtype, shape):
    """A module that returns its input as float32 or float64, with a product."""
    wide = "float64" if dtype in {"float64", "int64", "uint64", "int32", "uint32"} else "float32"
    function = trace(lambda x: (x.cast(wide) * 2.0,), TensorSpec(("N", *shape), dtype))
    return Module({"predict": function}, {"predict": "predict"})


def served(module, feeds):
    return next(iter(artifact(freeze(module, "predict")).session().run(feeds).values()))


def both(steps, column, raw=None):
    """(served from raw samples, model on what numpy computed)."""
    raw = RAW if raw is None else raw
    x = prepared(steps, raw)[column]
    module = model_of(str(x.dtype), x.shape[1:])
    full = with_preprocessing(module, "predict", steps, schema_of(raw), {"x": column})
    names = {p.name for p in full.inputs("predict")}
    return served(full, {name: raw[name] for name in names}), served(module, {"x": x})


def same(steps, column, raw=None):
    y, expected = both(steps, column, raw)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


EXACT = [
    ([Scale("image")], "image"),
    ([Scale("image", 16)], "image"),
    ([Normalize("image", 127.0, 41.5)], "image"),
    ([Normalize("image", (1.0, 2.5, 1 / 3), (0.1, 0.3, 7.0))], "image"),
    ([Normalize("age", 3, 0.7)], "age"),
    ([Scale("image"), Normalize("image", (0.1, 0.2, 0.3), 0.25)], "image"),
    ([Clip("image", 20, 100)], "image"),
    ([Clip("vector", high=0.25)], "vector"),
    ([Clip("codes", low=0)], "codes"),
    ([Reshape("image", (-1, 4))], "image"),
    ([Reshape("class", (1, 1))], "class"),
    ([Transpose("image", (1, 2, 0))], "image"),
    ([CenterCrop("image", (5, 5))], "image"),
    ([CenterCrop("image", (12, 3))], "image"),
    ([Stack(("age", "class"), "v")], "v"),
    ([Stack(("vector", "vector2"), "v")], "v"),
    ([Concatenate(("vector", "age", "codes"), "v")], "v"),
    ([OneHot("class", 5)], "class"),
    ([OneHot("codes", 8, "bool")], "codes"),
    ([Lookup("codes", (7, 3, -20))], "codes"),
    ([Lookup("class", (4, 2), unknown=-1)], "class"),
    ([Lookup("codes", (7, 3, -20)), OneHot("codes", 3), Cast("codes", "int64")], "codes"),
    ([Select(("class", "image")), Rename("image", "x"), Drop(("class",)), Scale("x")], "x"),
    ([Flip("image"), Shift("image", 2), RandomCrop("image", (12, 10), 2), Erase("image", (3, 3)),
      Noise("image", 0.1), Jitter("image", 0.1, 0.1), Scale("image")], "image"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "column"), EXACT)
def test_a_served_model_computes_the_same_bits(steps, column):
    raw = RAW | {"vector2": RAW["vector"][::-1], "codes": np.abs(RAW["codes"]) % 8}
    raw = raw if isinstance(steps[0], OneHot | Clip) else raw | {"codes": RAW["codes"]}
    same(steps, column, raw)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_is_served_between_all_types(source, target):
    x = np.array([0, 1, 2, 100, 127, 3.75, 0.5, 1, 0]).astype(source)
    same([Cast("x", target)], "x", {"x": x})


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
def test_bounds_are_served_in_all_types(dtype):
    same([Clip("x", 3, 100)], "x", {"x": np.arange(0, 9 * 14, 14).astype(dtype)})


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d[0] in "iu"])
def test_classes_are_served_in_all_types(dtype):
    x = np.arange(9).astype(dtype)
    same([OneHot("x", 9)], "x", {"x": x})
    if dtype != "uint64":
        same([Lookup("x", (3, 4, 100), unknown=7)], "x", {"x": x})


@pytest.mark.parametrize("size", [(6, 5), (4, 20), (30, 7), (1, 1), (12, 10)])
def test_resized_images_agree(size):
    y, expected = both([Resize("image", size)], "image")
    # Halves between two bytes may be rounded to either, in the last digit of float32.
    assert np.abs(y - expected).max() <= 2
    assert (y != expected).mean() < 0.03
    y, expected = both([Scale("image"), Resize("image", size)], "image")
    np.testing.assert_allclose(y, expected, atol=4e-6)


def test_a_random_window_is_served_as_the_middle():
    padded = np.pad(RAW["image"], ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=9)
    module = model_of("uint8", (3, 9, 12))
    steps = [RandomCrop("image", (9, 12), padding=1, fill=9)]
    full = with_preprocessing(module, "predict", steps, schema_of(RAW), {"x": "image"})
    y = served(full, {"image": RAW["image"]})
    np.testing.assert_array_equal(y, 2.0 * padded[:, :, 2:11])


DRAWN = st.one_of(
    st.sampled_from([Scale, Flip]).map(lambda kind: kind("image")),
    st.builds(Normalize, st.sampled_from(["image", "class", "vector"]),
              st.floats(-3, 3, width=32), st.floats(0.125, 3, width=32)),
    st.builds(Cast, st.sampled_from(["image", "class", "age", "codes", "vector"]),
              st.sampled_from(DTYPES)),
    st.builds(Clip, st.sampled_from(["image", "class", "vector"]), st.integers(0, 3),
              st.integers(3, 90)),
    st.builds(CenterCrop, st.sampled_from(["image", "float"]),
              st.tuples(st.integers(1, 12), st.integers(1, 10))),
    st.builds(Transpose, st.just("image"), st.permutations(range(3)).map(tuple)),
    st.builds(Reshape, st.just("image"), st.sampled_from([(-1,), (-1, 2), (2, 3, -1), (3, -1)])),
    st.builds(Lookup, st.sampled_from(["class", "codes"]), st.just((3, 0, 7, 2)),
              st.sampled_from([None, 4])),
    st.builds(OneHot, st.sampled_from(["class", "codes"]), st.integers(3, 6),
              st.sampled_from(DTYPES)),
    st.builds(Stack, st.just(("class", "age")), st.sampled_from(["class", "both"])),
    st.builds(Concatenate, st.just(("vector", "class", "codes")), st.just("all")),
    st.builds(Rename, st.sampled_from(["all", "image", "codes"]), st.just("class")),
    st.builds(Drop, st.just(("class",))),
)  # fmt: skip


def valid(steps):
    """Those of the steps that fit one behind the other, and the block after them."""
    block, kept = RAW, []
    for step in steps:
        try:
            block = prepared([step], block)
        except InvalidInput:
            continue
        kept.append(step)
    return kept, block


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(DRAWN, min_size=2, max_size=9), data=st.data())
def test_any_pipeline_is_served_with_the_same_bits(steps, data):
    steps, block = valid(steps)
    assume(steps)
    same(steps, data.draw(st.sampled_from(sorted(block))))


def test_columns_that_no_input_needs_are_left_out():
    schema = {"image": Field("uint8", (1, 4, 4)), "label": Field("text"), "n": Field("int64")}
    steps = [Scale("image"), Lookup("label", ("a", "b")), Tokenize("label2", ("a",))]
    full = with_preprocessing(
        model_of("float32", (1, 4, 4)), "predict", steps[:2], schema, {"x": "image"}
    )
    assert [(p.name, str(p.type)) for p in full.inputs("predict")] == [("image", "uint8[N,1,4,4]")]
    assert {n.op.name for n in full.entry("predict").nodes} <= {"Cast", "Constant", "Div", "Mul"}


def test_several_inputs_take_columns_of_one_pipeline():
    function = trace(
        lambda b, a: ops.concat([a, b.cast("float32")], 1),
        TensorSpec(("K", 2), "int64"), TensorSpec(("K", 4)),
    )  # fmt: skip
    module = Module({"f": function}, {"predict": "f", "other": "f"})
    steps = [Stack(("class", "n"), "pair"), Normalize("vector", 1.0, 2.0)]
    raw = {"vector": RAW["vector"], "n": np.arange(N), "class": RAW["class"]}
    full = with_preprocessing(
        module, "predict", steps, schema_of(raw), {"a": "vector", "b": "pair"}
    )
    assert [p.name for p in full.inputs("predict")] == ["class", "n", "vector"]
    assert [str(p.type) for p in full.inputs("other")] == ["int64[K,2]", "float32[K,4]"]
    y = served(full, raw)
    block = prepared(steps, raw)
    np.testing.assert_array_equal(y, np.concatenate([block["vector"], block["pair"]], 1))


def test_a_column_that_two_inputs_take_is_computed_once():
    function = trace(lambda a, b: a - b, TensorSpec(("N", 4)), TensorSpec(("N", 4)))
    module = Module({"predict": function}, {"predict": "predict"})
    steps = [Normalize("vector", 1.0, 2.0), Rename("vector", "v")]
    full = with_preprocessing(module, "predict", steps, schema_of(RAW), {"a": "v", "b": "v"})
    assert [p.name for p in full.inputs("predict")] == ["vector"]
    assert [n.op.name for n in full.entry("predict").nodes].count("Div") == 1
    assert not served(full, {"vector": RAW["vector"]}).any()
    full = with_preprocessing(module, "predict", [], schema_of(RAW), {"a": "vector", "b": "vector"})
    assert [p.name for p in full.inputs("predict")] == ["vector"]


def test_a_step_of_another_kind_is_refused_at_once():
    class Windows(Step):
        pass

    schema = {"x": Field("float32")}
    with pytest.raises(InvalidInput, match="Windows has no form in a served graph"):
        with_preprocessing(
            model_of("float32", ()), "predict", [Windows(), Scale("later")], schema, {"x": "x"}
        )


def test_a_pipeline_is_served_from_the_samples_of_its_source():
    labels = np.array(["cat", "dog", "cow"] * 3, object)
    dataset = (
        arrays({"image": RAW["image"], "y": labels})
        .then(Scale("image"), Lookup("y", ("cat", "cow", "dog")), Flip("image", probability=0))
        .where("y", "<", 2)
        .shuffle()
        .then(Normalize("image", 0.5, 2.0))
        .roles("image", "y")
        .batch(4)
    )
    module = model_of("float32", (3, 12, 10))
    full = with_pipeline(module, dataset)
    assert [p.name for p in full.inputs("predict")] == ["image"]
    steps = json.loads(full.meta[META_KEY])
    assert [step["step"] for step in steps] == ["Scale", "Lookup", "Normalize"]
    (batch,) = list(dataset.opened().batches(0))[:1]
    kept = np.flatnonzero(labels != "dog")
    y = served(full, {"image": RAW["image"][kept]})
    expected = served(module, {"x": batch["image"]})
    assert len(expected) == 4
    assert all(any((a == b).all() for b in y) for a in expected)


def test_what_a_pipeline_computes_in_python_is_refused():
    dataset = arrays({"x": RAW["vector"]}).map(lambda sample: sample)
    with pytest.raises(InvalidInput, match="Map has no form in a served graph"):
        with_pipeline(model_of("float32", (4,)), dataset)
    function = trace(lambda a, b: a - b, TensorSpec(("N", 4)), TensorSpec(("N", 4)))
    module = Module({"predict": function}, {"predict": "predict"})
    with pytest.raises(InvalidInput, match="are a, b, but those of the dataset are x; name as"):
        with_pipeline(module, dataset)


def test_each_kind_of_step_is_served_or_refused():
    refused = {name for name, kind in STEPS.items() if not issubclass(kind, tuple(ONNX_FORMS))}
    assert refused == {"pad", "tokenize", "map", "window", "padded_batch"}


@pytest.mark.parametrize(
    ("steps", "column", "match"),
    [
        ([Tokenize("text", ("a",)), Pad("text", 4)], "text", "Pad has no form in a served graph"),
        ([Lookup("text", ("a",))], "text", "takes numbers of one shape, but column 'text'"),
        ([Pad("series", 4, lengths="n")], "n", "Pad has no form in a served graph"),
        ([], "series", r"takes numbers of one shape, but column 'series' .* is float32\[\*\]"),
        ([], "text", "takes numbers of one shape"),
        ([Lookup("class", tuple(range(70_000)))], "class", "at most 65536 values, got 70000"),
    ],
)
def test_what_has_no_form_is_refused_with_the_way_out(steps, column, match):
    schema = {"text": Field("text"), "series": Field("float32", (None,)), "class": Field("int64")}
    with pytest.raises(InvalidInput, match=match) as raised:
        with_preprocessing(model_of("int64", ()), "predict", steps, schema, {"x": column})
    assert "let the caller compute" in str(raised.value)


def test_a_column_that_does_not_fit_is_refused():
    module = model_of("float32", (3, 12, 10))
    schema = schema_of(RAW)
    for steps, inputs, match in (
        ([], {"x": "image"}, r"'x' is float32\[N,3,12,10\], .* 'image' .* is uint8\[3, 12, 10\]"),
        ([Scale("image"), CenterCrop("image", (9, 9))], {"x": "image"}, r"float32\[3, 9, 9\]"),
        ([], {"x": "q"}, "takes the column 'q', but the columns after the steps are image, float"),
        ([], {}, "the inputs are x, got columns for none"),
        ([], {"x": "image", "z": "age"}, "the inputs are x, got columns for x, z"),
        ([Scale("q")], {"x": "image"}, "no column 'q'"),
    ):
        with pytest.raises(InvalidInput, match=match):
            with_preprocessing(module, "predict", steps, schema, inputs)


def test_a_raw_column_may_not_have_the_name_of_a_result():
    function = trace(lambda x: {"age": x * 2.0}, TensorSpec(("N",), "float64"))
    module = Module({"predict": function}, {"predict": "predict"})
    with pytest.raises(InvalidInput, match="'age' is both a column of raw samples and a result"):
        with_preprocessing(module, "predict", [], schema_of(RAW), {"x": "age"})


@pytest.mark.parametrize(
    ("step", "wrong"),
    [(OneHot("x", 3), -1), (OneHot("x", 3), 3), (Lookup("x", (5, 6)), 7)],
)
def test_a_value_that_a_step_refuses_makes_the_call_fail(step, wrong):
    good = np.array([5, 5] if isinstance(step, Lookup) else [0, 1])
    x = prepared([step], {"x": good})["x"]
    module = model_of(str(x.dtype), x.shape[1:])
    full = with_preprocessing(module, "predict", [step], {"x": Field("int64")}, {"x": "x"})
    session = artifact(freeze(full, "predict")).session()
    session.run({"x": good})
    with pytest.raises(InvalidInput, match="out of data bounds"):
        session.run({"x": np.array([good[0], wrong])})


def test_the_module_tells_its_steps():
    steps = [Scale("image"), Flip("image"), Normalize("image", (0.5, 0.25, 1.0), 0.5)]
    module = dataclasses.replace(
        model_of("float32", (3, 12, 10)), meta={"labels": "[]", "preprocessing": "[]"}
    )
    full = with_preprocessing(module, "predict", steps, schema_of(RAW), {"x": "image"})
    assert full.meta.keys() == {"labels", META_KEY}
    assert json.loads(full.meta[META_KEY]) == [
        {"step": "Scale", "column": "image", "top": 255},
        {"step": "Normalize", "column": "image", "mean": [0.5, 0.25, 1.0], "std": 0.5},
    ]
    scopes = [n.meta.scope for n in full.entry("predict").nodes if n.op.name != "Constant"]
    assert scopes[:4] == ["preprocessing.Scale"] * 2 + ["preprocessing.Normalize"] * 2


STEPS_OF_DIGITS = [Reshape("pixels", (1, 8, 8)), Scale("pixels", 16), Flip("pixels")]


@pytest.fixture(scope="module")
def digits():
    """(module of trained LeNet, raw bytes (n, 64), what it was trained on)."""
    module, _, held_out = nets.digits()
    return module, np.rint(held_out.x.reshape(-1, 64) * 16).astype(np.uint8), held_out.y


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_bundle_takes_raw_samples(tmp_path, digits, quantize):
    module, raw, labels = digits
    block = {"pixels": raw}
    for step in STEPS_OF_DIGITS[:2]:
        block = step.apply(block, RowDraws(0, 0, 0, np.arange(len(raw))))
    full = with_preprocessing(
        module, "predict", STEPS_OF_DIGITS, {"pixels": Field("uint8", (64,))}, {"x": "pixels"}
    )
    outputs = []
    for name, one, x in (("raw", full, raw), ("plain", module, block["pixels"])):
        path = tmp_path / f"{name}.bundle"
        report = convert(one, quantize=quantize, calibration=x[:100], evaluation=(x, labels),
                         max_accuracy_drop=2, out=path)  # fmt: skip
        assert report.accuracy is not None
        assert report.accuracy.before > 0.9
        bundle = Bundle.load(path)
        (info,) = bundle.inputs
        assert (info.name, info.dtype) == (("pixels", "uint8") if one is full else ("x", "float32"))
        outputs.append(bundle.predict(**{info.name: x})["logits"])
        products = [(layer.op, layer.int8) for layer in report.layers]
        assert products == [("Conv", quantize is not None), ("Gemm", quantize is not None)]
    np.testing.assert_array_equal(outputs[0], outputs[1])


@pytest.mark.slow
def test_preprocessing_stays_in_float_before_the_first_rounding(tmp_path, digits):
    module, raw, _ = digits
    steps = [*STEPS_OF_DIGITS, Normalize("pixels", 0.3, 0.4), Transpose("pixels", (0, 2, 1))]
    full = with_preprocessing(
        module, "predict", steps, {"pixels": Field("uint8", (64,))}, {"x": "pixels"}
    )
    convert(full, quantize="int8", calibration=raw[:100], out=tmp_path / "a.bundle")
    nodes = load_from_string(Bundle.load(tmp_path / "a.bundle").model).graph.node
    kinds = [node.op_type for node in nodes if node.op_type != "Constant"]
    assert kinds[: kinds.index("QuantizeLinear")] == [
        "Reshape", "Cast", "Div", "Sub", "Div", "Transpose",
    ]  # fmt: skip
