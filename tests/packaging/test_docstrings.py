"""Examples in docstrings run, under the modules' own names."""

import doctest
import importlib
from pathlib import Path

import pytest

NAMESPACE = Path(__file__).parents[2] / ".ci" / "namespace"
NO_EXAMPLES = ("_pb2", "_pb2_grpc", "__main__")  # generated code, and modules that run on import


def modules():
    for package in sorted((NAMESPACE / "triplane").iterdir()):
        for path in sorted(package.glob("**/*.py")):
            name = ".".join(path.relative_to(NAMESPACE).with_suffix("").parts)
            if not name.endswith(NO_EXAMPLES) and ">>>" in path.read_text(encoding="utf-8"):
                yield name.removesuffix(".__init__")


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings_hold(name):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried
    assert failed == 0
