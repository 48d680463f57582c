"""The devices that onnxruntime runs a graph on, by name; importing this loads no onnxruntime."""

from typing import Final, Literal, get_args

Device = Literal["cpu", "cuda"]

DEVICES: Final[tuple[str, ...]] = get_args(Device)
