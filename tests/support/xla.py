"""Programs of XLA beside those of the reference engine."""

import numpy as np

from triplane.unified_ir.engines import engine


def agrees(function, args, *, rtol=1e-3, atol=1e-4):
    """Both engines give results of one type, shape and value."""
    wanted = engine("reference").compile(function)(*args)
    found = engine("xla").compile(function)(*args)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
