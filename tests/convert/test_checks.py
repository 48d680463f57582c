"""The check against the float reference."""

import numpy as np
import pytest
from tests.quantize import nets
from tests.runtime.samples import Y, bundle_spec, plan_spec

from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.convert.checks import (
    check_against_reference,
    check_runnable,
    check_served,
    first,
)
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.quantize import Frozen, artifact, freeze
from triplane.unified_ir.runtime import Bundle, write_bundle, write_plan


def test_a_graph_that_computes_something_else_is_not_written():
    module = nets.lenet()
    frozen = fold(freeze(module, "predict"))
    x = {"x": nets.images(2)}
    check_against_reference(module, "predict", artifact(frozen).session(), x)
    weights = {n: w * np.float32(1.1) for n, w in frozen.weights.items()}
    wrong = artifact(Frozen(frozen.function, weights)).session()
    with pytest.raises(Conflict, match=r"'logits' differs by .* from the reference"):
        check_against_reference(module, "predict", wrong, x)


def test_first_takes_a_few_samples():
    frozen = freeze(nets.lenet(), "predict")
    assert len(first(frozen, {"x": nets.images(9)}, 4)["x"]) == 4


def test_a_bundle_that_does_not_answer_its_goldens_is_not_kept(tmp_path):
    path = tmp_path / "m.bundle"
    old = write_bundle(path, bundle_spec(), check=check_served)
    for change in ({"golden_outputs": {"y": Y + 1}}, {"model": b"no graph"}):
        with pytest.raises(Corrupt, match=r"^m\.bundle cannot be read back .*not kept"):
            write_bundle(path, bundle_spec(**change), check=check_served)
    assert Bundle.load(path).digest == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.bundle"]


def test_a_plan_with_an_entry_that_no_session_takes_is_not_kept(tmp_path):
    path = tmp_path / "m.plan"
    write_plan(path, plan_spec(), check=check_runnable)
    path.unlink()
    entries = {**plan_spec().entries, "evaluate": b"no graph"}
    with pytest.raises(Corrupt, match=r"^m\.plan cannot be read back .*not kept"):
        write_plan(path, plan_spec(entries=entries), check=check_runnable)
    assert not list(tmp_path.iterdir())
