"""Which files of the folder of updates go when a round is over."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cloud.federation.journals import entry

from triplane.cloud.federation import journal
from triplane.cloud.federation.update_store import UPLOADS, UpdateSpec, UpdateStore
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.run import Lease, Leases, Phase, Round
from triplane.unified_ir.federated.core.vector import VectorLayout

SHA256 = hashlib.sha256(b"an update").digest()


def run_with_lease(id_, device="ann"):
    """A run whose open round has one lease, of this device."""
    record = entry(id=id_)
    lease = Lease(id=hashlib.sha256(id_.encode()).hexdigest()[:32], device=device)
    leases: Any = Leases.from_leases([lease])
    state = journal.first_projection(record).state
    round_ = Round(number=1, evaluates=False, attempt=0, opened_s=1.0, leases=leases)
    collecting = SimpleNamespace(phase=Phase.COLLECTING, round=round_, members=state.members)
    run: Any = SimpleNamespace(record=record, projection=SimpleNamespace(state=collecting))
    return run, lease


def store_of(folder, runs):
    store = UpdateStore(folder / "updates", BlobFolder(folder / "blobs"))
    for run in runs:
        store._specs[run.record.id] = UpdateSpec({}, 1 << 20, VectorLayout.of({}))
    return store


def admit(store, runs, sha256):
    asyncio.run(store.admit(runs, "ann", sha256, 1 << 17))


def test_a_file_stays_while_another_run_that_it_may_be_for_is_in_its_round(tmp_path):
    """A device with work of two runs uploads; the upload does not say for which one."""
    (one, first), (other, second) = run_with_lease("1" * 16), run_with_lease("2" * 16)
    store = store_of(tmp_path, [one, other])
    admit(store, [one, other], SHA256)
    assert store.forget([second]) == set()
    assert store.forget([first]) == {SHA256}


def test_so_does_one_that_only_the_other_run_has_room_for(tmp_path):
    (one, first), (other, second) = run_with_lease("1" * 16), run_with_lease("2" * 16)
    store, earlier = store_of(tmp_path, [one, other]), [bytes([i]) * 32 for i in range(UPLOADS)]
    for sha256 in earlier:
        admit(store, [one], sha256)
    with pytest.raises(InvalidInput, match="began 4 files"):
        admit(store, [one], SHA256)
    admit(store, [one, other], SHA256)
    assert store.forget([second]) == {bytes(32)}, "the oldest, for which it has no room any more"
    assert store.forget([first]) == {SHA256, *earlier} - {bytes(32)}


def test_a_long_lease_keeps_the_newest_files_only(tmp_path):
    """Of a device in a slow run and a fast one, the files of all rounds of the fast one."""
    slow, first = run_with_lease("1" * 16)
    store, removed = store_of(tmp_path, [slow]), set()
    uploads = [bytes([i]) * 32 for i in range(10 * UPLOADS)]
    for number, sha256 in enumerate(uploads):
        fast, lease = run_with_lease(f"{number:016x}")
        store._specs[fast.record.id] = store._specs[slow.record.id]
        admit(store, [slow, fast], sha256)
        removed |= store.forget([lease])
    assert removed == set(uploads[:-UPLOADS])
    assert store.forget([first]) == set(uploads[-UPLOADS:])
