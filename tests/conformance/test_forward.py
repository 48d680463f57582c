"""Forward mode of every row: <u, J v> = <J^T u, v>, with J v from the gradient rule alone."""

import numpy as np
import pytest
from tests.conformance.rows import FLAT, ids
from tests.conformance.uses import differentiable, first_shallow, recorded

from triplane.unified_ir.autodiff.forward import pushforward
from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import introduced_sizes
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.table import TABLE

SMOOTH = [use for use in differentiable() if str(use.row) not in FLAT]


def maps(function, names):
    """J v and J^T u, of tangents and cotangents that are further parameters."""
    wanted = [function.param_names.index(n) for n in names]
    build = Build(TABLE, "maps")
    with build:
        params = [build.param(p.name, p.type) for p in function.params]
        vs = [build.param(f"v.{n}", function.param(n).type) for n in names]
        us = [build.param(f"u.{n}", r.type) if r.type.dtype.is_float else None
              for n, r in zip(function.result_names, function.results, strict=True)]  # fmt: skip
        results, push = pushforward(function, params, wanted)
        moved = push(vs)
        _, pull = record_vjp(function, params, wanted)
        pulled = pull(us)
        forward = [zeros(y.shape, y.dtype) if t is None else t
                   for y, t in zip(results, moved, strict=True) if y.dtype.is_float]  # fmt: skip
        back = [zeros(v.shape, v.dtype) if g is None else g
                for v, g in zip(vs, pulled, strict=True)]  # fmt: skip
    named = {f"f{i}": t for i, t in enumerate(forward)} | {f"b{i}": g for i, g in enumerate(back)}
    return build.finish(named), len(forward)


@pytest.mark.slow
@pytest.mark.parametrize("use", first_shallow(SMOOTH), ids=ids(SMOOTH))
def test_forward_mode_is_the_transpose_of_the_gradient_rule(use):
    function, args = recorded(use, np.float64)
    names = use.smooth(args)
    floats = [r for r in function.results if r.type.dtype.is_float]
    if not names or not floats or any(introduced_sizes(n) for n in function.nodes):
        return
    both, count = maps(function, names)
    rng = np.random.default_rng(2)
    vs = [rng.standard_normal(args[n].shape) for n in names]
    us = [rng.standard_normal(r.type.shape).astype(r.type.dtype.numpy) for r in floats]
    found = ReferenceEngine().compile(both)(*args.values(), *vs, *us)
    left = sum(float((u * t).sum()) for u, t in zip(us, found[:count], strict=True))
    right = sum(float((g * v).sum()) for g, v in zip(found[count:], vs, strict=True))
    coarse = any(u.dtype != np.float64 for u in us)
    assert left == pytest.approx(right, rel=1e-5 if coarse else 1e-9, abs=1e-6 if coarse else 1e-10)
