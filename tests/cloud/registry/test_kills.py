"""kill -9 of a cloud that takes pushes: what it acknowledged is there, whole and audited."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import func, select
from tests.cloud.databases import SQLITE_FIRST
from tests.cloud.registry.models import QUICK, child, registry_of

from triplane.cloud.identity import audit
from triplane.cloud.registry.tables import VERSIONS
from triplane.cloud.store import Database

ROOT = Path(__file__).parents[3]
LIVES = 4
CLOUD = """
import asyncio, json, sys
from pathlib import Path
from tests.cloud.registry.models import QUICK, asked, child, registry_of
from triplane.cloud.store import Database

async def main(url, folder):
    async with registry_of(Database.open(url), folder, command=child(QUICK)) as registry:
        async def push(i):
            model = f"model{i % 3}"
            request = asked(registry.blobs.put(b"%d" % i), model, aliases=("newest",))
            made = await registry.push(request, by="op")
            print(json.dumps([model, made.version, made.blob.hex(), request.key.hex()]), flush=True)

        for start in range(0, 1000, 4):
            await asyncio.gather(*[push(i) for i in range(start, start + 4)])

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


def killed(url, folder, after):
    """What a cloud acknowledged until it was killed, `after` pushes after its start."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", CLOUD, url, str(folder)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    ) as cloud:  # fmt: skip
        assert cloud.stdout is not None
        lines = [cloud.stdout.readline() for _ in range(after)]
        cloud.kill()
        lines += cloud.stdout.read().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert len(whole) >= after
    return whole


@SQLITE_FIRST
@pytest.mark.slow
def test_acknowledged_pushes_survive_kills(database_url, tmp_path):
    rng = random.Random(0)
    acknowledged: list[list] = []
    for _ in range(LIVES):
        acknowledged += killed(database_url, tmp_path, after=rng.randrange(1, 20))
    database = Database.open(database_url)

    async def main():
        async with registry_of(database, tmp_path, command=child(QUICK)) as registry:
            for model, number, blob, _ in acknowledged:
                found = await registry.version(f"{model}@{number}")
                assert found.blob.hex() == blob
                registry.blobs.find(found.blob)
            for model in await registry.models():
                versions = await registry.versions(model.name, size=1000)
                assert [v.version for v in versions] == list(range(model.latest, 0, -1))
                assert model.aliases == (("newest", model.latest),)

    try:
        asyncio.run(main())
        pushes = database.read_now(lambda c: c.scalar(select(func.count()).select_from(VERSIONS)))
        entries = database.read_now(lambda c: audit.page(c, 1))
    finally:
        database.close()
    assert pushes == len(entries) >= len(acknowledged)
    assert audit.verify(entries)[0] == pushes
