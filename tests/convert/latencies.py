"""A measured latency, made up."""

from triplane.unified_ir.convert.latency import (
    CallTiming,
    Latency,
    Quartiles,
)


def timing(median):
    q = Quartiles(0.9 * median, median, 1.1 * median)
    return CallTiming(cpu=q, wall=q)


def box(median):
    return Quartiles(0.9 * median, median, 1.1 * median)


def latency(float32, int8, control, *, on_target=True):
    return Latency(
        batch=1, rounds=9, float32=timing(float32), control=timing(control), int8=timing(int8),
        ratio=box(int8 / float32), control_ratio=box(control / float32), on_target=on_target,
    )  # fmt: skip
