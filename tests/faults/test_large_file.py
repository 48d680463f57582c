"""A large file goes to the cloud, both sides are killed in the middle, and it arrives.

Bound on memory: neither side grows by more than `MOST_BYTES` over what it had before, whatever the
size of the file.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.faults.fleet import fleet, wait_until

from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.channels import connect
from triplane.proto.identity import IdentityFolder
from triplane.proto.transfer import download

MIB = 1 << 20
MOST_BYTES = 96 * MIB
UPLOAD = """
import sys
from pathlib import Path
from triplane.proto.channels import connect
from triplane.proto.identity import IdentityFolder
from triplane.proto.transfer import upload
with connect(IdentityFolder(Path(sys.argv[1]))) as channel:
    print(upload(channel, Path(sys.argv[2])).hex(), flush=True)
"""


def written(path, size):
    """A file of `size` bytes that does not compress; returns its digest."""
    digest, block = hashlib.sha256(), os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            data = number.to_bytes(8, "big") + block[8:]
            file.write(data)
            digest.update(data)
    return digest.digest()


def uploading(running, path):
    return subprocess.Popen(
        [sys.executable, "-c", UPLOAD, str(running.home / "operator"), str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )


def resident(pid):
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def travels(folder, size):
    """Upload with a kill on either side, then download; returns what to write down."""
    path = folder / "large"
    sha256 = written(path, size)
    with fleet(folder) as running:
        partial = running.home / "blobs" / "partial" / sha256.hex()
        before = resident(running.cloud.child.pid)
        grown = 0

        def stored():
            nonlocal grown
            grown = max(grown, resident(running.cloud.child.pid) - before)
            return partial.stat().st_size if partial.exists() else 0

        first = uploading(running, path)
        wait_until(lambda: stored() > size // 4, "a quarter", 300)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        kept = stored()
        second = uploading(running, path)
        wait_until(lambda: stored() > size // 2, "half", 300)
        running.restart_cloud()
        before, peak = resident(running.cloud.child.pid), 0
        while second.poll() is None:
            peak = max(peak, resident(second.pid))
            stored()
            time.sleep(0.02)
        out, _ = second.communicate()
        assert out.strip() == sha256.hex()
        back = BlobFolder(folder / "node")
        with connect(IdentityFolder(running.home / "operator")) as channel:
            arrived = download(channel, sha256, size, back)
            stored()
        assert digest_of(arrived) == sha256
    assert kept >= size // 4
    return {"kept": kept, "cloud grew by": grown, "uploader's peak": peak}


def check(folder, size):
    found = travels(folder, size)
    assert found["cloud grew by"] < MOST_BYTES, found
    assert found["uploader's peak"] < 2 * MOST_BYTES, found
    return found


@pytest.mark.slow
@pytest.mark.long
def test_a_large_file_survives_kills_on_both_sides(tmp_path):
    check(tmp_path, 128 * MIB)


@pytest.mark.deep
def test_a_gigabyte_survives_kills_on_both_sides(tmp_path):
    started = time.time()
    found = check(tmp_path, 1024 * MIB)
    lines = "".join(f"| {what} | {count / MIB:.0f} MiB |\n" for what, count in found.items())
    evidence = Path(__file__).parents[2] / "docs" / "evidence" / "large-file.md"
    evidence.write_text(
        "# One gigabyte\n\n"
        "`make deep ARGS='tests/faults/test_large_file.py'`: upload, kill -9 of the uploader, "
        "resume, kill -9 of the cloud, resume, download, digests compared. "
        f"{time.strftime('%Y-%m-%d', time.gmtime(started))}, {os.cpu_count()} cores, "
        f"{time.time() - started:.0f} s.\n\n| what | size |\n|---|---|\n{lines}"
    )
