import pytest

from triplane.cloud.fleet.capability import BundleNeeds, Capability
from triplane.proto.fitting import fits, version_key

NODE = Capability(
    runtime="onnxruntime", runtime_version="1.23.2", max_opset=21,
    instructions=("avx2", "fma"), memory_bytes=1 << 30, targets=("ort-x64",),
)  # fmt: skip


@pytest.mark.parametrize(
    "needs",
    [
        BundleNeeds(),
        BundleNeeds(runtime="onnxruntime", min_version="1.23.2", opset=21),
        BundleNeeds(runtime="onnxruntime", min_version="1.9", instructions=("avx2",)),
        BundleNeeds(memory_bytes=1 << 30),
    ],
)
def test_a_bundle_whose_needs_are_met_fits(needs):
    assert fits(needs, NODE) is None


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (BundleNeeds(runtime="cann"), "needs the runtime cann, the node has onnxruntime"),
        (BundleNeeds(min_version="1.23.10"), "1.23.10, the node has 1.23.2"),
        (BundleNeeds(opset=22), "needs opset 22, the node's runtime knows opsets to 21"),
        (BundleNeeds(instructions=("avx2", "avx512_vnni")), "instructions avx512_vnni, which"),
        (BundleNeeds(memory_bytes=(1 << 30) + 1), "needs 1073741825 bytes of memory"),
    ],
)
def test_a_need_that_is_not_met_is_named(needs, reason):
    assert reason in (fits(needs, NODE) or "")


def test_versions_compare_by_their_numbers():
    assert version_key("1.9") < version_key("1.23.2") < version_key("1.23.10+cpu")
    assert version_key("no version") == ()
