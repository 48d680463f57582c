"""Questions about a call: which node makes a number that is not finite, which gradient is zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triplane.unified_ir.autodiff.zero import ZeroGradient, zero_gradient
from triplane.unified_ir.engines.finite import first_nonfinite as first_in_function
from triplane.unified_ir.frontend.run import current_floats, host_arguments, state_arrays
from triplane.unified_ir.frontend.trace import Traceable, Traced, record
from triplane.unified_ir.ir.graph import Array


def first_nonfinite(f: Traceable, *args: Any, **kwargs: Any) -> str:
    """The first argument or node that is NaN or infinite in a call of `f`; empty if none is.

    The text names operator, file and line, cell, and what went in and came out. Branches and
    loops are looked into. Runs on the reference; no state is written back.

    >>> import numpy as np
    >>> from triplane.unified_ir import ops
    >>> first_nonfinite(lambda x: ops.log(x).sum(), np.array([1.0, 2.0], np.float32))
    ''
    """
    done, arrays = _recorded(f, args, kwargs)
    return first_in_function(
        done.function, dict(zip(done.function.param_names, arrays, strict=True))
    )


def zero_gradients(f: Traceable, *args: Any, **kwargs: Any) -> list[ZeroGradient]:
    """Inputs and state of a call of `f` whose gradient is zero whatever the values are, and why.

    The gradient is that of the first result. Of the state, what is trained is asked about; of the
    inputs, floating-point tensors. `str` of each tells the nodes and lines that pass no gradient.
    """
    done, _ = _recorded(f, args, kwargs)
    wanted = [
        p.name
        for p in done.function.params
        if p.type.dtype.is_float and (p.name not in done.state or done.state[p.name].trainable)
    ]
    found = (zero_gradient(done.function, name) for name in wanted)
    return [z for z in found if z is not None]


def _recorded(
    f: Traceable, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Traced, list[Array]]:
    arguments, arrays = host_arguments(f, args, kwargs, current_floats())
    done = record(f, arguments)
    return done, [*arrays, *state_arrays(done)]
