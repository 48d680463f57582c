"""The opset and operators that an emitted graph may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from triplane.proto.errors import InvalidInput

OLDEST_OPSET: Final = 17
NEWEST_OPSET: Final = 26
_IR_VERSIONS: Final = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13}
"""The IR version that each opset was released with, capped at what onnxruntime 1.31 reads."""


@dataclass(frozen=True, slots=True)
class OnnxTarget:
    """An ai.onnx opset; onnxruntime has CPU kernels for nearly all of 21, for less of later ones.

    operators: names, with domain, of further operators that the runtime has.
    device: "cuda" writes forms that onnxruntime's CUDA kernels take.
    """

    opset: int = 21
    operators: frozenset[str] = frozenset()
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        if not OLDEST_OPSET <= self.opset <= NEWEST_OPSET:
            raise InvalidInput(
                f"graphs are emitted for opsets {OLDEST_OPSET} to {NEWEST_OPSET}, got {self.opset}"
            )

    @property
    def ir_version(self) -> int:
        """The ONNX IR version to declare."""
        return _IR_VERSIONS[self.opset]


DEFAULT: Final = OnnxTarget()
