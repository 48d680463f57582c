"""Diagnose a call: which node produces a non-finite number, which gradients are zero."""

from __future__ import annotations

from typing import Any

from triplane.unified_ir.autodiff.zero import ZeroGradient, zero_gradient
from triplane.unified_ir.engines.finite import first_nonfinite as first_in_function
from triplane.unified_ir.frontend.compare import recorded_call
from triplane.unified_ir.frontend.trace import Traceable


def first_nonfinite(f: Traceable, *args: Any, **kwargs: Any) -> str:
    """Describe the first argument or node of a call of `f` that is NaN or infinite, or return "".

    The text names operator, file and line, cell, and the node's inputs and outputs. Nodes inside
    branches and loops are checked too. The call runs on the reference engine and writes no state
    back.

    >>> import numpy as np
    >>> from triplane.unified_ir import ops
    >>> first_nonfinite(lambda x: ops.log(x).sum(), np.array([1.0, 2.0], np.float32))
    ''
    """
    traced, arrays = recorded_call(f, args, kwargs)
    return first_in_function(
        traced.function, dict(zip(traced.function.param_names, arrays, strict=True))
    )


def zero_gradients(f: Traceable, *args: Any, **kwargs: Any) -> list[ZeroGradient]:
    """List the inputs and state of a call of `f` whose gradient is always zero, and why.

    The gradient is that of the first result, with respect to trained state and floating-point
    inputs. `str` of each entry names the nodes and lines that pass no gradient.
    """
    traced, _ = recorded_call(f, args, kwargs)
    wanted = [
        p.name
        for p in traced.function.params
        if p.type.dtype.is_float and (p.name not in traced.state or traced.state[p.name].trainable)
    ]
    gradients = (zero_gradient(traced.function, name) for name in wanted)
    return [z for z in gradients if z is not None]
