"""Topologies: which meshes there are, which link a mesh axis needs, hostile files."""

import json

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.factors import Factors
from triplane.unified_ir.passes.sharding import LinkCost, Topology, read_topology
from triplane.unified_ir.passes.sharding.strategies import NodeSize, strategies
from triplane.unified_ir.passes.sharding.topology import MAX_FILE_BYTES, Measurement


def test_meshes_of_any_number():
    t = Topology(devices_per_host=8)
    assert t.meshes(1) == [(1,)]
    assert t.meshes(7) == [(7,)]
    assert t.meshes(6) == [(6,), (2, 3)]
    assert t.meshes(8) == [(8,), (2, 4)]
    assert set(t.meshes(16)) == {(16,), (2, 8), (8, 2), (4, 4)}


def test_an_axis_inside_a_host_uses_the_fast_link():
    t = Topology(devices_per_host=8)
    assert t.link((2, 8), 1) is t.inside
    assert t.link((2, 8), 0) is t.between
    assert t.link((16,), 0) is t.between
    assert t.link((2, 4), 0) is t.inside


def test_a_ring_that_leaves_a_host_uses_the_slow_link():
    t = Topology(devices_per_host=6)
    assert t.link((3, 4), 1) == t.between  # rings of 4 on hosts of 6: some are on two hosts


def test_a_group_across_racks_pays_the_slowest_link():
    t = Topology(
        devices_per_host=4, hosts_per_rack=2, inside=LinkCost(1e-6, 1e11),
        between=LinkCost(5e-6, 1e10), racks=LinkCost(3e-6, 1e9),
    )  # fmt: skip
    assert t.link((4, 4), 1) is t.inside
    assert t.link((2, 8), 1) is t.between
    assert t.link((8,), 0) is t.between
    # Three hosts: two in one rack, the third in another.
    assert t.link((12,), 0) == LinkCost(5e-6, 1e9)
    assert t.link((4, 4), 0) == LinkCost(5e-6, 1e9)
    # By hand: 16 devices are 4 rounds of 5 us; each sends 15/16 of 16 MB at 1 GB/s.
    assert t.link((16,), 0).seconds(16, 15e6) == pytest.approx(20e-6 + 15e-3)


def test_an_all_reduce_over_two_racks_by_hand():
    t = Topology(devices_per_host=2, hosts_per_rack=2, racks=LinkCost(1e-4, 1e9))
    problem = split_of_sum(t)
    # 2 passes of 3 rounds, and 2 * 7/8 of 4,000 bytes.
    assert problem == pytest.approx(2 * (3 * 1e-4 + 7 / 8 * 4000 / 1e9))


def split_of_sum(topology):
    """The time of the all-reduce of 1,000 float32 that 8 devices have parts of."""
    whole, rows = (-1,), (0,)
    factors = Factors((("n", "d"),), (("d",),), "")
    size = NodeSize(0, ((8, 1000),), ((1000,),), (32000,), (4000,))
    (summed,) = (
        s
        for s in strategies(factors, size, (8,), topology)
        if (s.operands, s.outputs) == ((rows,), (whole,))
    )
    return summed.transfer.seconds


def test_links_without_racks_are_those_between_hosts():
    t = Topology(devices_per_host=2)
    assert t.link((4096,), 0) is t.between


def test_a_file_gives_what_it_names(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"devices_per_host": 4, "between": {"latency_s": 1e-3}}))
    t = read_topology(path)
    assert t.devices_per_host == 4
    assert t.between == LinkCost(1e-3, Topology().between.bytes_per_s)
    assert t.inside == Topology().inside
    assert str(path) in t.source


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "cluster.json"
    t = Topology(
        devices_per_host=3, hosts_per_rack=5, inside=LinkCost(1e-7, 5e10), flops_per_s=1e14,
        measured=Measurement("host", "2026-01-02 03:04 UTC", "2 x CPU", "jax 1"),
    )  # fmt: skip
    path.write_text(json.dumps(t.json()))
    assert read_topology(path).json() == t.json()
    assert read_topology(path).source == f"rates of {path}, measured on 2 x CPU"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("[1]", "must be a JSON object with"),
        ("[" * 20000, "is not JSON"),
        ('{"flops": 1}', "has no field 'flops'; it has between, devices_per_host"),
        ('{"flops_per_s": 0}', "flops_per_s must be a number from 1e-12 to"),
        ('{"flops_per_s": NaN}', "flops_per_s must be a number from 1e-12 to"),
        ('{"flops_per_s": Infinity}', "flops_per_s must be a number from 1e-12 to"),
        ('{"flops_per_s": true}', "flops_per_s must be a number from 1e-12 to"),
        ('{"flops_per_s": 1e400}', "flops_per_s must be a number from 1e-12 to"),
        ('{"flops_per_s": 1e-300}', "flops_per_s must be a number from 1e-12 to"),
        ('{"devices_per_host": 2.5}', "devices_per_host must be a whole number"),
        ('{"hosts_per_rack": 0}', "hosts_per_rack must be a whole number from 1"),
        ('{"hosts_per_rack": true}', "hosts_per_rack must be a whole number from 1"),
        ('{"racks": {"latency_s": -1}}', "racks: latency_s must be a number"),
        ('{"measured": 1}', "measured must be a JSON object with devices, host, software, when"),
        ('{"measured": {"host": 1}}', "host must be a printable text"),
        ('{"measured": {"host": "\\u001b[2J"}}', "host must be a printable text"),
        ('{"measured": {"host": "' + "x" * 300 + '"}}', "host must be a printable text"),
        ('{"inside": 3}', "inside must be a JSON object"),
        ('{"inside": {"latency_s": "1"}}', "latency_s must be a number"),
        ('{"a": "' + "x" * MAX_FILE_BYTES + '"}', "is larger than"),
    ],
)
def test_other_files_are_refused(tmp_path, text, why):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=why):
        read_topology(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidInput, match="is not JSON"):
        read_topology(path)


@pytest.mark.parametrize("record", [{"flops_per_s": [1] * 9000}, {"x" * 30_000: 1}])
def test_an_error_shows_little_of_a_hostile_file(tmp_path, record):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(record))
    with pytest.raises(InvalidInput) as refused:
        read_topology(file)
    assert len(str(refused.value)) < 300 + len(str(file))


def test_what_is_still_assumed_is_named(tmp_path):
    file = tmp_path / "t.json"
    link = {"latency_s": 1e-5, "bytes_per_s": 1e9}
    rates = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "inside": link, "between": link,
             "devices_per_host": 2}  # fmt: skip
    file.write_text(json.dumps(rates))
    assert read_topology(file).source == f"rates of {file}"
    file.write_text(json.dumps({**rates, "hosts_per_rack": 2}))
    assert read_topology(file).source.endswith("; assumed: racks")
    file.write_text(json.dumps({**rates, "inside": {"latency_s": 1e-5}}))
    assert read_topology(file).source.endswith("; assumed: bytes_per_s of inside")
    del rates["devices_per_host"]
    file.write_text(json.dumps(rates))
    assert read_topology(file).source.endswith("; assumed: 8 devices a host")
