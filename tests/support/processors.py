"""Which kernels this machine has."""

import platform

import pytest

from triplane.unified_ir.runtime.session import saturates

x64 = pytest.mark.skipif(
    platform.machine() != "x86_64" or saturates(),
    reason="kernels of x64 processors with int8 dot products",
)
