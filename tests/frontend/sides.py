"""Runs one function every way it can run, and differentiates it by finite differences."""

import numpy as np

from triplane.unified_ir import mode

SIDES = ("eager", "onnx", "reference")


def on_side(side, floats="float32"):
    """The mode a side names."""
    return mode("eager", floats=floats) if side == "eager" else mode("graph", side, floats=floats)


def everywhere(f, *args):
    """The result of `f` on every side, after checking that the sides agree."""
    found = {}
    for side in SIDES:
        with on_side(side):
            found[side] = f(*args)
    for side in SIDES[1:]:
        np.testing.assert_allclose(
            np.asarray(found[side]), np.asarray(found["eager"]), rtol=1e-5, atol=1e-6, err_msg=side
        )
    return found["eager"]


def slope(f, x, v, step=1e-6):
    """Central difference of a scalar function along `v`, in float64 on the reference engine."""
    with on_side("reference", "float64"):
        return (float(f(x + step * v)) - float(f(x - step * v))) / (2 * step)


def floats(*values):
    """A float32 vector."""
    return np.array(values, np.float32)
