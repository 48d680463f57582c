"""SCAFFOLD: control variates keep devices with different samples from drifting apart.

Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1 with option II: a device's step goes against
g - c_i + c. Its control variate after K steps, c_i - c + (x - y_K) / (K a), is the mean of the
gradients along the way, so each step writes down the mean so far, and the graph of a step is all
that there is. The change of `scaffold.PATH` is that of c_i; the cloud adds |S| / N of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from triplane.unified_ir.autodiff import GRAD
from triplane.unified_ir.federated.algorithms import steps
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR
from triplane.unified_ir.federated.algorithms.objective import Objective
from triplane.unified_ir.ir import Function, Role, StateTensor
from triplane.unified_ir.ops import cast, equal
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes import clean

CONTROL: Final = "scaffold."
"""Prefix of the cloud's control variate of a parameter, shared by all devices."""
OWN: Final = "own_control."
"""Prefix of a device's own control variate, which stays there."""
TAKEN: Final = "control_steps"
"""Steps that a device has taken in all rounds."""


def controlled_gradient(of: Objective, _: int) -> Function:
    """Return D L(batch, w) - c_i + c, and c_i and c as they are after this step."""
    with Build(TABLE, "controlled_gradient") as build:
        state = {v.name: build.param(v.name, v.type) for v in of.reads}
        batch = {v.name: build.param(v.name, v.type) for v in of.batch}
        results, grads = of.differentiate(batch, state)
        scalar = steps.scalar_of(of)
        taken, before = build.param(TAKEN, scalar), build.param(ANCHOR + TAKEN, scalar)
        controls = {TAKEN: taken + 1.0}
        later = 1.0 - cast(equal(taken, before), scalar.dtype.name)
        for path in steps.shared_trained(of):
            g, type_ = grads[path], state[path].type
            own, first = build.param(OWN + path, type_), build.param(ANCHOR + OWN + path, type_)
            c = build.param(ANCHOR + CONTROL + path, type_)
            # The mean of this round's gradients; in its first step, what is there is of the last.
            mean = own * later.cast(g.dtype)
            mean = mean + (g - mean) / (taken - before + 1.0).cast(g.dtype)
            controls |= {OWN + path: mean, CONTROL + path: c + mean - first}
            grads[path] = g - first + c
    named = {GRAD + path: g for path, g in grads.items()}
    return clean(build.finish({**results, **controls, **named}))


def control_variates(of: Objective, _hyper: Mapping[str, float]) -> dict[str, StateTensor]:
    """Return control variates of 0, and their values at the start of a round."""
    none = np.zeros((), steps.scalar_of(of).dtype.numpy)
    state = {
        TAKEN: StateTensor(Role.PERSONAL, none),
        ANCHOR + TAKEN: StateTensor(Role.BUFFER, none),
    }
    for path in steps.shared_trained(of):
        zero = np.zeros_like(of.state[path].array)
        state[CONTROL + path] = StateTensor(Role.BUFFER, zero)
        state[OWN + path] = StateTensor(Role.PERSONAL, zero)
        for name in (CONTROL + path, OWN + path):
            state[ANCHOR + name] = StateTensor(Role.BUFFER, zero)
    return state
