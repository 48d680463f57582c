"""The table of targets."""

import platform

import pytest
from tests.support.pages import check_table

from triplane.proto import machines
from triplane.unified_ir.convert.targets import TARGETS, cpu_flags, instruction_note, int8_scheme
from triplane.unified_ir.onnx import DYNAMIC_LSTM, OnnxTarget

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
    assert int8_scheme(target).name == target.scheme
    assert set(target.operators) <= {DYNAMIC_LSTM}, "operators that the emitter knows"
    assert target.traps
    assert target.summary
    assert instruction_note(target)


def test_seven_bit_weights_are_for_unsigned_activations_only():
    assert int8_scheme(TARGETS["ort-x64"], reduce_range=True).name == "u8s7"
    assert int8_scheme(TARGETS["ort-arm64"], reduce_range=True).name == "s8s8"


def test_the_targets_of_this_machine_are_those_that_its_nodes_report():
    here = {t.name for t in TARGETS.values() if t.is_here}
    assert here == set(machines.targets_here())
    assert {"x86_64": {"ort-x64"}, "aarch64": {"ort-arm64"}}.get(platform.machine(), set()) <= here


def test_machines_name_targets_that_exist():
    assert {name for names in machines.TARGETS.values() for name in names} <= TARGETS.keys()


def test_the_documentation_lists_every_target():
    heads = ("target", "runs on", "opset", "int8", "traps")
    check_table("converting.md", "targets", heads, map(listed, TARGETS.values()))


def listed(target):
    """The target's line in the table of docs/converting.md."""
    row = int8_scheme(target)
    kinds = [t.numpy.kind.replace("i", "s").upper() for t in (row.activation, row.weight)]
    return (
        f"`{target.name}`",
        f"{target.runtime} {target.min_version} or newer, {target.summary}",
        str(target.opset),
        f"{kinds[0]}8 activations, {kinds[1]}{row.weight_bits} weights",
        "; ".join(target.traps),
    )
