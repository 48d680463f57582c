"""Linear models, support vectors and trees of ai.onnx.ml give what onnxruntime gives."""

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.support.onnx_models import emitted

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx
from triplane.unified_ir.engines import engine

RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, 3)).astype(np.float32)
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"]


def model(op, outputs, x=X, **attrs):
    names = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(op, ["x"], names, name="one", domain="ai.onnx.ml", **attrs)
    shapes: dict[int, list[str | int | None]] = {1: ["N"], 2: ["N", None]}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), ["N", 3])],
        [
            helper.make_tensor_value_info(n, kind, shapes[rank])
            for n, (kind, rank) in zip(names, outputs, strict=True)
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


CLASSES = ((TensorProto.INT64, 1), (TensorProto.FLOAT, 2))
WORDS = ((TensorProto.STRING, 1), (TensorProto.FLOAT, 2))
NUMBERS = ((TensorProto.FLOAT, 2),)


def agrees(op, outputs, x=X, **attrs):
    made = model(op, outputs, x, **attrs)
    wanted = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    for found, expected in zip(emitted(import_onnx(made), x=x), wanted, strict=True):
        if expected.dtype.kind in "fi":
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)
        else:
            np.testing.assert_array_equal(found, expected)


def draw(*shape, low=-1.0, high=1.0):
    return RNG.uniform(low, high, shape).astype(np.float32).ravel().tolist()


@pytest.mark.parametrize(
    ("offset", "scale"), [([0.5, -1.0, 2.0], [2.0, 0.5, -3.0]), ([0.25], [4.0])]
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float64])
def test_a_scaler_shifts_and_scales(offset, scale, dtype):
    agrees("Scaler", NUMBERS, (X * 3).astype(dtype), offset=offset, scale=scale)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_a_normalizer_divides_each_row(norm):
    agrees("Normalizer", NUMBERS, np.vstack([np.abs(X), np.zeros((1, 3), np.float32)]), norm=norm)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_linear_classifier_of_three_gives_labels_and_scores(transform):
    weights = draw(3, 3, low=0.0, high=0.1) if transform == "PROBIT" else draw(3, 3)
    bias = [0.4, 0.5, 0.6] if transform == "PROBIT" else [0.1, -0.2, 0.3]
    agrees(
        "LinearClassifier",
        CLASSES,
        coefficients=weights,
        intercepts=bias,
        classlabels_ints=[4, 7, 9],
        post_transform=transform,
    )


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
def test_one_score_for_two_words_gives_both_scores(transform):
    agrees(
        "LinearClassifier",
        WORDS,
        coefficients=draw(3),
        intercepts=[0.1],
        classlabels_strings=["no", "yes"],
        post_transform=transform,
    )


def test_a_linear_regressor_has_a_row_for_each_target():
    agrees("LinearRegressor", NUMBERS, coefficients=draw(2, 3), intercepts=[1.0, 2.0], targets=2)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"])
def test_a_linear_regressor_of_one_target_reads_its_transform_as_onnxruntime_does(transform):
    given = {"coefficients": [0.05, 0.02, 0.03], "intercepts": [0.4], "targets": 1}
    agrees("LinearRegressor", NUMBERS, np.abs(X) / 10, post_transform=transform, **given)


@pytest.mark.parametrize(("targets", "intercepts"), [(1, [1.0, 2.0, 3.0]), (3, [1.0])])
def test_intercepts_that_are_not_one_for_each_target_are_refused(targets, intercepts):
    given = {"coefficients": draw(targets, 3), "intercepts": intercepts, "targets": targets}
    with pytest.raises(InvalidInput, match=f"{len(intercepts)} biases for {targets} targets"):
        agrees("LinearRegressor", NUMBERS, **given)


KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_a_support_vector_regressor_sums_kernels(kernel, one_class):
    agrees(
        "SVMRegressor",
        NUMBERS,
        coefficients=draw(4),
        support_vectors=draw(4, 3),
        n_supports=4,
        rho=[0.1],
        kernel_type=kernel,
        kernel_params=[0.3, 0.2, 2.0],
        one_class=one_class,
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("sure", [False, True])
def test_a_support_vector_classifier_votes_by_pairs(kernel, classes, sure):
    pairs = classes * (classes - 1) // 2
    counts = [2, 3, 1, 2][:classes]
    more = {"prob_a": draw(pairs, low=-3), "prob_b": draw(pairs)} if sure else {}
    agrees(
        "SVMClassifier",
        CLASSES,
        coefficients=draw(classes - 1, sum(counts)),
        support_vectors=draw(sum(counts), 3),
        vectors_per_class=counts,
        rho=draw(pairs, low=-0.1, high=0.1),
        kernel_type=kernel,
        kernel_params=[0.3, 0.2, 2.0],
        classlabels_ints=[3, 5, 6, 8][:classes],
        **more,
    )


def forest(stem, targets, modes=("BRANCH_LEQ",), positive=False, tracks=0):
    """Two trees: one of two levels, one of one; each leaf weighs for each of the targets."""
    kinds = itertools.cycle(modes)
    shape = {
        0: [(0, 1, 2, 0.1), (1, 3, 4, -0.2), None, None, None],
        1: [(2, 1, 2, 0.3), None, None],
    }
    nodes, leaves = [], []
    for tree, rows in shape.items():
        for i, row in enumerate(rows):
            feature, yes, no, value = row or (0, 0, 0, 0.0)
            kind = next(kinds) if row else "LEAF"
            nodes.append((tree, i, feature, kind, yes, no, value, tracks if row else 0))
            leaves += [] if row else [(tree, i, t) for t in targets]
    names = "treeids nodeids featureids modes truenodeids falsenodeids values"
    attrs = {
        f"nodes_{name}": [row[i] for row in nodes]
        for i, name in enumerate([*names.split(), "missing_value_tracks_true"])
    }
    attrs |= {
        f"{stem}_{name}": [row[i] for row in leaves]
        for i, name in enumerate(["treeids", "nodeids", "ids"])
    }
    low = 0.0 if positive else -1.0
    attrs[f"{stem}_weights"] = draw(len(leaves), low=low, high=0.5 if positive else 1.0)
    return attrs


MODES = [
    ("BRANCH_LEQ",), ("BRANCH_LT",), ("BRANCH_GTE",), ("BRANCH_GT", "BRANCH_LEQ"),
    ("BRANCH_EQ", "BRANCH_NEQ", "BRANCH_LT"),
]  # fmt: skip
HOLES = np.where(RNG.random((12, 3)) < 0.3, np.nan, RNG.normal(size=(12, 3))).astype(np.float32)


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("tracks", [0, 1])
def test_trees_walk_by_their_modes_and_past_missing_numbers(modes, tracks):
    agrees(
        "TreeEnsembleRegressor",
        NUMBERS,
        HOLES,
        n_targets=2,
        base_values=[0.5, -0.5],
        **forest("target", [0, 1], modes, tracks=tracks),
    )


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_trees_are_aggregated(how, targets, dtype):
    agrees(
        "TreeEnsembleRegressor",
        NUMBERS,
        X.astype(dtype),
        n_targets=targets,
        aggregate_function=how,
        **forest("target", list(range(targets))),
    )


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize("base", [(), (0.25, 0.5, -0.5)])
def test_trees_classify_three_words(transform, base):
    agrees(
        "TreeEnsembleClassifier",
        WORDS,
        classlabels_strings=["a", "b", "c"],
        post_transform=transform,
        **({"base_values": list(base)} if base else {}),
        **forest("class", [0, 1, 2]),
    )


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("target", "base"), [(0, ()), (0, (0.1,)), (1, ())])
def test_trees_with_one_score_classify_two(transform, positive, target, base):
    agrees(
        "TreeEnsembleClassifier",
        CLASSES,
        classlabels_int64s=[3, 8],
        post_transform=transform,
        **({"base_values": list(base)} if base else {}),
        **forest("class", [target], positive=positive),
    )


def spoiled(**changes):
    attrs = forest("target", [0])
    for name, (i, value) in changes.items():
        attrs[name][i] = value
    return model("TreeEnsembleRegressor", NUMBERS, n_targets=1, **attrs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes_truenodeids": (0, 0)}, "not trees"),
        ({"nodes_truenodeids": (1, 0)}, "not trees"),
        ({"nodes_falsenodeids": (0, 77)}, "a node that its tree does not have"),
        ({"nodes_nodeids": (1, 0)}, "named twice"),
        ({"nodes_featureids": (0, 3)}, "reads feature 3"),
        ({"nodes_modes": (0, "BRANCH_NEAR")}, "BRANCH_NEAR"),
        ({"target_ids": (0, 5)}, "an unknown leaf or target"),
        ({"target_nodeids": (0, 99)}, "unknown leaf"),
    ],
)
def test_nodes_that_are_no_trees_are_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        import_onnx(spoiled(**changes))


def test_maps_are_refused_with_the_way_out():
    node = helper.make_node(
        "ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
    )
    made = model("Scaler", NUMBERS, offset=[0.0], scale=[1.0])
    made.graph.node.append(node)
    made.graph.node[-1].input[0] = "y0"
    made.graph.output[0].name = "y"
    with pytest.raises(InvalidInput, match="zipmap=False"):
        import_onnx(made)


def test_trees_run_on_the_reference_engine_too():
    made = model("TreeEnsembleRegressor", NUMBERS, n_targets=1, **forest("target", [0]))
    function = import_onnx(made).entry("predict")
    (found,) = engine("reference").compile(function)(X)
    (wanted,) = ort.InferenceSession(made.SerializeToString()).run(None, {"x": X})
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_one_score_of_exactly_zero_gives_the_first_word():
    agrees(
        "LinearClassifier",
        WORDS,
        np.zeros((2, 3), np.float32),
        coefficients=draw(3),
        intercepts=[0.0],
        classlabels_strings=["no", "yes"],
    )
