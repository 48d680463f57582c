"""Changes of a round beyond a limit are in a file, and the study is the same."""

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from triplane.proto.disk import NoRoom
from triplane.unified_ir.federated.study import change_spool, simulate
from triplane.unified_ir.federated.study.change_spool import ChangeSpool

from .given import bits, module, shards, study


def test_changes_beyond_the_limit_are_read_from_the_file():
    rng = np.random.default_rng(0)
    changes: list[dict[str, Any]] = [
        {
            "w": rng.standard_normal((3, 4)).astype(np.float32).T,
            "b": np.asarray(rng.random()),
            "e": np.zeros((0, 2)),
        }
        for _ in range(3)
    ]
    with ChangeSpool(max_bytes=60) as spool:
        kept = [spool.keep(change) for change in changes]
        assert kept[0] is changes[0]
        for one, other in zip(kept, changes, strict=True):
            assert one.keys() == other.keys()
            for name, x in other.items():
                assert one[name].dtype == x.dtype
                np.testing.assert_array_equal(one[name], x)
    with pytest.raises(ValueError, match="closed file"):
        kept[1]["w"]


def test_a_full_disk_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(change_spool, "TemporaryFile", partial(open, "/dev/full", "w+b"))
    with (
        pytest.raises(NoRoom, match="No space left on device; set TMPDIR to a folder"),
        ChangeSpool(max_bytes=0) as spool,
    ):
        spool.keep({"w": np.zeros(3)})


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_a_study_over_a_file_has_the_same_bits(algorithm, monkeypatch):
    usual = simulate(module(), shards(), study(algorithm))
    simulating = import_module("triplane.unified_ir.federated.study.simulate")
    monkeypatch.setattr(simulating, "ChangeSpool", partial(ChangeSpool, max_bytes=0))
    assert bits(simulate(module(), shards(), study(algorithm))) == bits(usual)
