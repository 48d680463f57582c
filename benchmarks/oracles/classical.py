"""ONNX files of scikit-learn, LightGBM and XGBoost models: FOLDER/NAME.KIND.onnx and NAME.KIND.npz.

Run as `benchmarks.oracles.exports`, with the same interpreter:

    .venv-oracles/bin/python -m benchmarks.oracles.classical FOLDER [--only PATTERN]

The models are fitted to drawn samples. Beside each file lie two sets of inputs, `a:NAME` and
`b:NAME`. Samples lie off the thresholds of the trees, where float32 and float64 could differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

FEATURES: Final = 6
OPSETS: Final = {"": 17, "ai.onnx.ml": 3}


def samples(rows: int, seed: int) -> Any:
    """x: (rows, features) float32."""
    return np.random.default_rng(seed).normal(size=(rows, FEATURES)).astype(np.float32)


def labels(x: Any, classes: int) -> Any:
    """Classes that a curved boundary decides."""
    score = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.5 * x[:, 3]
    cuts = np.quantile(score, np.arange(1, classes) / classes)
    return np.digitize(score, cuts)


def numbers(x: Any) -> Any:
    """A curved function of the features."""
    return (x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.5 * x[:, 3]).astype(np.float32)


def _sklearn(make: Callable[[], Any], target: Callable[[Any], Any]) -> Callable[[], bytes]:
    def converted() -> bytes:
        from skl2onnx import convert_sklearn
        from skl2onnx.common.data_types import FloatTensorType
        from sklearn.base import is_classifier

        x = samples(200, 1)
        model = make().fit(x, target(x))
        options = {id(model): {"zipmap": False}} if is_classifier(model) else None
        types = [("x", FloatTensorType([None, FEATURES]))]
        made = convert_sklearn(model, initial_types=types, options=options, target_opset=OPSETS)
        return bytes(made.SerializeToString())

    return converted


def _boosted(library: str, make: Callable[[], Any], target: Callable[[Any], Any]) -> Any:
    def converted() -> bytes:
        import onnxmltools
        from onnxmltools.convert.common.data_types import FloatTensorType

        x = samples(200, 1)
        model = make().fit(x, target(x))
        types = [("x", FloatTensorType([None, FEATURES]))]
        convert = getattr(onnxmltools, f"convert_{library}")
        options = {"zipmap": False} if library == "lightgbm" else {}
        made = convert(model, initial_types=types, target_opset=15, **options)
        return bytes(made.SerializeToString())

    return converted


def two(x: Any) -> Any:
    """Two classes."""
    return labels(x, 2)


def three(x: Any) -> Any:
    """Three classes."""
    return labels(x, 3)


def words(x: Any) -> Any:
    """Three classes with names."""
    return np.array(["low", "middle", "high"])[labels(x, 3)]


def _of(module: str, name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from importlib import import_module

        return getattr(import_module(module), name)(**options)

    return make


def _piped(*steps: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        from sklearn.pipeline import make_pipeline

        return make_pipeline(*(step() for step in steps))

    return make


_SCALER: Final = _of("sklearn.preprocessing", "StandardScaler")
_LINEAR: Final = "sklearn.linear_model"
_ENSEMBLE: Final = "sklearn.ensemble"
_SEEDED: Final[dict[str, Any]] = {"random_state": 0, "n_estimators": 6, "max_depth": 4}

MODELS: Final[dict[str, Callable[[], bytes]]] = {
    "logistic": _sklearn(_of(_LINEAR, "LogisticRegression"), two),
    "logistic_three": _sklearn(_of(_LINEAR, "LogisticRegression"), three),
    "logistic_words": _sklearn(_piped(_SCALER, _of(_LINEAR, "LogisticRegression")), words),
    "linear": _sklearn(_piped(_SCALER, _of(_LINEAR, "LinearRegression")), numbers),
    "ridge_classifier": _sklearn(_of(_LINEAR, "RidgeClassifier"), three),
    "scaled": _sklearn(_piped(_of("sklearn.preprocessing", "MinMaxScaler"),
                              _of("sklearn.decomposition", "PCA", n_components=3),
                              _of(_LINEAR, "LogisticRegression")), three),
    "sgd": _sklearn(_of(_LINEAR, "SGDClassifier", loss="log_loss", random_state=0), three),
    "linear_svc": _sklearn(_of("sklearn.svm", "LinearSVC"), three),
    "svc": _sklearn(_of("sklearn.svm", "SVC", probability=True, random_state=0), three),
    "svc_two": _sklearn(_of("sklearn.svm", "SVC", kernel="poly"), two),
    "svc_plain": _sklearn(_of("sklearn.svm", "SVC"), three),
    "svr": _sklearn(_of("sklearn.svm", "SVR"), numbers),
    "svr_sigmoid": _sklearn(_of("sklearn.svm", "SVR", kernel="sigmoid", C=0.1), numbers),
    "tree": _sklearn(_of("sklearn.tree", "DecisionTreeClassifier", max_depth=5), three),
    "forest": _sklearn(_of(_ENSEMBLE, "RandomForestClassifier", **_SEEDED), three),
    "forest_two": _sklearn(_of(_ENSEMBLE, "ExtraTreesClassifier", **_SEEDED), two),
    "forest_numbers": _sklearn(_of(_ENSEMBLE, "RandomForestRegressor", **_SEEDED), numbers),
    "boosting": _sklearn(_of(_ENSEMBLE, "GradientBoostingClassifier", **_SEEDED), three),
    "boosting_two": _sklearn(_of(_ENSEMBLE, "GradientBoostingClassifier", **_SEEDED), two),
    "boosting_numbers": _sklearn(_of(_ENSEMBLE, "GradientBoostingRegressor", **_SEEDED), numbers),
    "perceptron": _sklearn(_of("sklearn.neural_network", "MLPClassifier", max_iter=50), three),
    "bayes": _sklearn(_of("sklearn.naive_bayes", "GaussianNB"), three),
    "lightgbm": _boosted("lightgbm", _of("lightgbm", "LGBMClassifier", n_estimators=6), three),
    "lightgbm_two": _boosted("lightgbm", _of("lightgbm", "LGBMClassifier", n_estimators=6), two),
    "lightgbm_numbers": _boosted("lightgbm", _of("lightgbm", "LGBMRegressor", n_estimators=6),
                                 numbers),
    "xgboost": _boosted("xgboost", _of("xgboost", "XGBClassifier", **_SEEDED), three),
    "xgboost_two": _boosted("xgboost", _of("xgboost", "XGBClassifier", **_SEEDED), two),
    "xgboost_numbers": _boosted("xgboost", _of("xgboost", "XGBRegressor", **_SEEDED), numbers),
}  # fmt: skip


def _kind(name: str) -> str:
    return name.split("_", maxsplit=1)[0] if name.startswith(("lightgbm", "xgboost")) else "sklearn"


def main() -> int:
    """Writes what `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a regular expression over NAME.KIND")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, make in MODELS.items():
        case = f"ml_{name}.{_kind(name)}"
        path = options.folder / f"{case}.onnx"
        if not re.search(options.only, case) or path.exists():
            continue
        try:
            path.write_bytes(make())
        except Exception as error:  # noqa: BLE001 - what a converter raises is its own
            (options.folder / f"{case}.txt").write_text(traceback.format_exc())
            print("refused by its exporter", case, repr(error)[:200], flush=True)
            continue
        sets = {"a:x": samples(5, 2), "b:x": samples(9, 3)}
        np.savez(path.with_suffix(".npz"), **sets)
        print("exported", case, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
