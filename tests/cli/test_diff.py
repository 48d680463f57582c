"""`triplane diff`: status 0 for the same, 1 for different, and what differs by name."""

import json

import numpy as np
import pytest
from tests.ir import graphs

from triplane.unified_ir import ops
from triplane.unified_ir.cli import shell
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE


def changed(**parts):
    """The shared module with some of its parts replaced."""
    m = graphs.module()
    kept = {"functions": m.functions, "entries": m.entries, "state": m.state, "meta": m.meta}
    return Module(**{**kept, **parts})


@pytest.fixture
def diff(tmp_path, capsys):
    """Saves two modules and compares them: exit code and output."""

    def compare(a, b, *options):
        a.save(tmp_path / "a.tpm")
        b.save(tmp_path / "b.tpm")
        code = shell.run(["diff", str(tmp_path / "a.tpm"), str(tmp_path / "b.tpm"), *options])
        return code, capsys.readouterr().out

    return compare


def small(f, scope=""):
    """A module of one function of x and y."""
    build = Build(TABLE, "f")
    build.scope = scope
    with build:
        x, y = (build.param(n, TensorSpec(("N", 4))) for n in "xy")
        made = f(x, y)
    return Module({"f": build.finish({"z": made})}, {"predict": "f"}, {})


def test_equal_models_are_the_same(diff):
    code, out = diff(graphs.module(), graphs.module())
    assert (code, out) == (0, "the models are the same: entries, graphs and state\n")
    code, out = diff(graphs.module(), graphs.module(), "--json")
    assert code == 0
    assert json.loads(out)["same"] is True


def test_another_line_of_source_is_no_change(diff):
    code, _ = diff(small(lambda x, y: x + y), small(lambda x, y: x + y, scope="block"))
    assert code == 0


def test_moved_state_is_measured(diff):
    state = dict(graphs.module().state)
    w = state["w"].array.copy()
    w[0, 0] += 0.5
    state["w"] = StateTensor(Role.PARAMETER, w)
    code, out = diff(graphs.module(), changed(state=state))
    assert code == 1
    assert out == ("state w  changed by at most 0.5, 0.5 of the largest; 1 of 12 elements\n")
    record = json.loads(diff(graphs.module(), changed(state=state), "--json")[1])
    assert record["state"]["moved"]["w"] == {
        "max_abs": 0.5, "max_rel": 0.5, "elements": 1, "of": 12,
    }  # fmt: skip


def test_state_that_is_not_finite_is_still_json(diff):
    state = dict(graphs.module().state)
    state["w"] = StateTensor(Role.PARAMETER, np.full((4, 3), np.nan, np.float32))
    code, out = diff(graphs.module(), changed(state=state), "--json")
    assert code == 1
    assert json.loads(out)["state"]["moved"]["w"]["max_abs"] == "nan"
    assert "NaN" not in out


def test_roles_and_types_that_changed_are_named(diff):
    state = {**graphs.module().state, "more": StateTensor(Role.BUFFER, np.zeros(2))}
    state["steps"] = StateTensor(Role.OPTIMIZER, state["steps"].array)
    _, out = diff(graphs.module(), changed(state=state))
    assert "state 'more' added" in out
    assert "state 'steps': 'int64[] buffer' -> 'int64[] optimizer'" in out


def test_a_node_put_in_between_is_the_only_change(diff):
    code, out = diff(
        small(lambda x, y: ops.tanh(ops.exp(x + y))),
        small(lambda x, y: ops.tanh(ops.exp(ops.relu(x + y)))),
    )
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "function f: 1 lines out, 2 in"
    assert [line[:4] for line in lines[1:]] == ["  - ", "  + ", "  + "]
    assert lines[1].startswith("  - ops Add@14 Exp@13 Tanh@13")
    assert "Relu(%2)" in lines[3]


def test_operands_that_alone_differ_are_a_change(diff):
    def chain(first):
        def f(x, y):
            a, b = ops.exp(x), ops.exp(y)
            return (a if first else b) + b

        return small(f)

    code, out = diff(chain(first=True), chain(first=False))
    assert code == 1
    assert "Add(%2, %3)" in out
    assert "Add(%3, %3)" in out


def test_entries_and_properties_that_changed_are_named(diff):
    m = graphs.module()
    other = changed(entries={"predict": "step", "adapt": "step"}, meta={"cell": "new"})
    code, out = diff(m, other)
    assert code == 1
    for line in (
        "entry 'train_step' removed",
        "entry 'adapt' added",
        "entry 'predict': 'predict' -> 'step'",
        "property 'classes' removed",
        "property 'cell': 'tests' -> 'new'",
    ):
        assert line in out


def test_functions_that_came_or_went_are_named(diff):
    m = graphs.module()
    _, out = diff(m, changed(functions={"predict": m.functions["predict"]},
                             entries={"predict": "predict"}))  # fmt: skip
    assert "function 'step' removed" in out


def test_long_differences_are_cut_in_text_and_whole_in_json(diff):
    def many(f):
        def chain(x, y):
            for _ in range(60):
                x = f(x)
            return x + y

        return small(chain)

    _, out = diff(many(ops.exp), many(ops.tanh))
    assert "... 21 more (--json lists all)" in out
    record = json.loads(diff(many(ops.exp), many(ops.tanh), "--json")[1])
    assert len(record["nodes"]["f"]["removed"]) == 61


def test_a_missing_file_is_an_error_above_one(tmp_path, capsys):
    assert shell.run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "no file at" in capsys.readouterr().err


def test_an_onnx_model_is_imported_first(tmp_path, capsys):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"\x08\x08")
    assert shell.run(["diff", str(path), str(path)]) == 2
    assert "import it first (triplane import)" in capsys.readouterr().err
