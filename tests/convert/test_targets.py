"""The table of targets."""

import platform
from pathlib import Path

import pytest

from triplane.unified_ir.convert.targets import TARGETS, cpu_flags, instruction_note, int8_scheme
from triplane.unified_ir.onnx import OnnxTarget

CPUINFO = {
    "x64": ("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n", {"fpu", "avx2", "avx512_vnni"}),
    "arm64": ("Features\t: fp asimd asimddp\n", {"fp", "asimd", "asimddp"}),
    "other": ("nothing of the kind\n", set()),
}


@pytest.mark.parametrize("kind", CPUINFO)
def test_flags_are_read_as_the_kernel_writes_them(kind, tmp_path):
    text, flags = CPUINFO[kind]
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_flags(tmp_path / "cpuinfo") == flags
    assert cpu_flags(tmp_path / "absent") == frozenset()


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_row_can_be_emitted_and_quantized(target):
    assert isinstance(target.onnx, OnnxTarget)
    assert int8_scheme(target).weight_limit == 127
    assert target.traps
    assert instruction_note(target)


def test_seven_bit_weights_are_for_unsigned_activations_only():
    assert int8_scheme(TARGETS["ort-x64"], reduce_range=True).name == "u8s7"
    assert int8_scheme(TARGETS["ort-arm64"], reduce_range=True).name == "s8s8"


def test_at_most_one_target_is_this_machine():
    here = [t.name for t in TARGETS.values() if t.is_here]
    assert here == {"x86_64": ["ort-x64"], "aarch64": ["ort-arm64"]}.get(platform.machine(), [])


def test_the_documentation_lists_every_target():
    text = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    for target in TARGETS.values():
        assert f"| `{target.name}` | {target.runtime} {target.min_version}" in text
        assert f"| {target.opset} |" in text
