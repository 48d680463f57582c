"""State of a cell that training assigns instead of differentiating."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.cell import Parameter
from triplane.unified_ir.ir.graph import Role

State = Any
"""The type of an attribute that holds state: a `Parameter` outside a trace, its `Tensor` inside."""


class Personal(Parameter):
    """A parameter that is trained and never leaves the device: no message has a field for it.

    start: its initial value, with which every device begins, even if it was trained here since.
    """

    def __init__(self, array: Any) -> None:
        super().__init__(array, role=Role.PERSONAL)
        self.start = self.array.copy()


class Buffer(Parameter):
    """State that `construct` may assign, such as running statistics."""

    def __init__(self, array: Any) -> None:
        super().__init__(array, role=Role.BUFFER)


class RandomKey(Parameter):
    """A random key, uint32[2]; code that draws with it assigns `ops.next_key` of it."""

    def __init__(self, array: Any) -> None:
        super().__init__(np.asarray(array), role=Role.KEY)
        if self.array.dtype != np.uint32 or self.array.shape != (2,):
            raise InvalidInput(
                f"a random key is uint32[2], got {self.array.dtype}{list(self.array.shape)}"
            )
