"""Activations and reshaping as cells, for use in `Sequential`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell, Parameter
from triplane.unified_ir.nn.sizes import check_axis, positive
from triplane.unified_ir.nn.state import State


class _Elementwise(Cell):
    """Applies one function to each element."""

    function: Callable[[ops.Tensor], ops.Tensor]

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return self.function(x)


class ReLU(_Elementwise):
    """max(x, 0)."""

    function = staticmethod(ops.relu)


class Tanh(_Elementwise):
    """Hyperbolic tangent."""

    function = staticmethod(ops.tanh)


class Sigmoid(_Elementwise):
    """1 / (1 + exp(-x))."""

    function = staticmethod(ops.sigmoid)


class GELU(_Elementwise):
    """x Phi(x) with the exact normal distribution (Hendrycks and Gimpel 2016)."""

    function = staticmethod(ops.gelu)


class LeakyReLU(Cell):
    """x where positive, else slope x (Maas et al. 2013)."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__()
        self.slope = slope

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.leaky_relu(x, alpha=self.slope)


class PReLU(Cell):
    """x where positive, else weight x with a learned weight (He et al. 2015).

    weight: (channels,), one per channel of axis 1, or (1,) for all; starts at `slope`.
    """

    weight: State

    def __init__(self, channels: int = 1, *, slope: float = 0.25) -> None:
        super().__init__()
        shape = positive("PReLU", channels=channels)
        self.weight = Parameter(np.full(shape, slope, np.float32))

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, channels, ...), or any shape if there is one slope."""
        (channels,) = self.weight.shape
        if channels != 1:
            check_axis(f"PReLU({channels})", f"(N, {channels}, ...)", x, 1, channels)
        ones = (1,) * max(x.rank - 2, 0)
        return ops.prelu(x, self.weight.reshape((channels, *ones)))


class ELU(Cell):
    """x where positive, else alpha (exp(x) - 1) (Clevert et al. 2015)."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.elu(x, alpha=self.alpha)


class SELU(_Elementwise):
    """ELU scaled so that layers keep mean 0 and variance 1 (Klambauer et al. 2017)."""

    function = staticmethod(ops.selu)


class SiLU(_Elementwise):
    """x sigmoid(x), also called Swish (Elfwing et al. 2017)."""

    function = staticmethod(ops.silu)


class Mish(_Elementwise):
    """x tanh(log(1 + exp(x))) (Misra 2019)."""

    function = staticmethod(ops.mish)


class HardSigmoid(Cell):
    """clip(x / 6 + 1/2, 0, 1)."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.hard_sigmoid(x, alpha=1 / 6, beta=0.5)


class HardSwish(_Elementwise):
    """x clip(x / 6 + 1/2, 0, 1) (Howard et al. 2019)."""

    function = staticmethod(ops.hard_swish)


class ReLU6(_Elementwise):
    """min(max(x, 0), 6)."""

    function = staticmethod(ops.relu6)


class Softplus(_Elementwise):
    """log(1 + exp(x))."""

    function = staticmethod(ops.softplus)


class Softsign(_Elementwise):
    """x / (1 + |x|)."""

    function = staticmethod(ops.softsign)


class _AlongAxis(Cell):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis


class Softmax(_AlongAxis):
    """exp(x) over its sum along an axis, the last by default."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape with that axis."""
        return ops.softmax(x, axis=self.axis)


class LogSoftmax(_AlongAxis):
    """The logarithm of `Softmax`, exact for small probabilities too."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape with that axis."""
        return ops.log_softmax(x, axis=self.axis)


class Identity(Cell):
    """x itself."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return x


class Unflatten(Cell):
    """x: (N, product of shape) -> (N, *shape)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = positive("Unflatten", **{f"size_{i}": n for i, n in enumerate(shape)})

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, product of shape)."""
        return x.reshape((x.shape[0], *self.shape))


class Flatten(Cell):
    """x: (N, ...) -> (N, product of the rest)."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, ...)."""
        return ops.flatten(x)
