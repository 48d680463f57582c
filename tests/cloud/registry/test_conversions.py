"""Children: what is wrong with a file is named, whatever dies on the way is survived."""

import asyncio
import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select, update
from tests.cloud.databases import SQLITE_FIRST
from tests.cloud.registry.models import (
    QUICK,
    WAIT_S,
    asked,
    child,
    model_bytes,
    npz,
    registry_of,
)
from tests.quantize import nets

from triplane.cloud.registry import ConversionRecipe, State, converting
from triplane.cloud.registry.conversions import COMMAND
from triplane.cloud.registry.tables import BUNDLES
from triplane.cloud.store import Database
from triplane.proto.errors import Corrupt, TriplaneError, Unavailable
from triplane.unified_ir import TensorSpec, nn, ops
from triplane.unified_ir.convert import convert

KEY = ("digits", 1, "ort-x64")
ROOT = Path(__file__).parents[3]
DIE = "import os; os.kill(os.getpid(), 9)"
COUNT = "import os; open({path!r}, 'a').write('.'); os.kill(os.getpid(), 9)"
HANG = "import sys; sys.stdin.read()"


def flipped(data, part):
    """The file with one bit changed within a part."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = archive.read(part)
    at = data.index(content) + len(content) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def bomb(name="manifest.pb"):
    """An archive of 1 MiB that unpacks to 1 GiB."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w") as out,
    ):
        for _ in range(1 << 10):
            out.write(bytes(1 << 20))
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: flipped(data, "weights.safetensors"), "digits.tpm.*weights.safetensors"),
        (lambda _: bomb(), "digits.tpm"),
        *(
            pytest.param(damage, message, marks=pytest.mark.long)
            for damage, message in (
                (lambda data: flipped(data, "module.pb"), "digits.tpm.*module.pb"),
                (lambda data: flipped(data, "manifest.pb"), "digits.tpm.*manifest"),
                (lambda data: data[:-1], "digits.tpm"),
                (lambda data: data + b"x", "digits.tpm"),
                (lambda _: b"PK" + bytes(1000), "digits.tpm"),
                (lambda _: b"", "digits.tpm"),
            )
        ),
    ],
)
def test_a_damaged_model_file_is_refused_and_the_part_named(sqlite, tmp_path, damage, message):
    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            blob = registry.blobs.put(damage(model_bytes(tmp_path)))
            with pytest.raises(Corrupt, match=message):
                await registry.push(asked(blob), by="op")
            assert await registry.models() == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_recipe_that_does_not_fit_its_model_is_refused(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            model = registry.blobs.put(model_bytes(tmp_path))
            wrong = registry.blobs.put(npz(x=np.zeros((4, 3), np.float32)))
            right = registry.blobs.put(npz(x=np.zeros((4, 1, 8, 8), np.float32)))
            junk = registry.blobs.put(b"no archive at all")
            packed = registry.blobs.put(bomb("x.npy"))
            for recipe, message in (
                (ConversionRecipe(entry="guess"), "guess"),
                (ConversionRecipe(quantize="int8", calibration=wrong), "calibration.npz"),
                (ConversionRecipe(quantize="int8", calibration=junk), "calibration.npz"),
                (ConversionRecipe(quantize="int8", calibration=packed), "calibration.npz"),
                (ConversionRecipe(evaluation=right), "evaluation.npz"),
            ):
                with pytest.raises(TriplaneError, match=message) as caught:
                    await registry.push(asked(model, recipe=recipe), by="op")
                assert not isinstance(caught.value, Unavailable)
                assert str(tmp_path) not in str(caught.value)
            assert await registry.models() == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_bundle_has_the_content_that_the_converter_gives_elsewhere(sqlite, tmp_path):
    samples = np.random.default_rng(0).random((16, 1, 8, 8)).astype(np.float32)

    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            model = registry.blobs.put(model_bytes(tmp_path))
            recipe = ConversionRecipe(
                quantize="int8", calibration=registry.blobs.put(npz(x=samples))
            )
            await registry.push(asked(model, recipe=recipe), by="op")
            async with asyncio.timeout(WAIT_S):
                return await registry.wait_bundle(*KEY)

    made = asyncio.run(main())
    here = convert(
        tmp_path / "lenet-0.tpm", quantize="int8", calibration=samples, name="digits",
        version="1", out=tmp_path / "here.bundle",
    )  # fmt: skip
    assert made.state is State.READY, made.reason
    assert made.content_digest.hex() == here.content_digest


class Open(nn.Cell):
    """Of a size that only samples tell."""

    def construct(self, x):
        return ops.relu(x)


@pytest.mark.slow
def test_a_refused_conversion_is_failed_for_good(sqlite, tmp_path):
    nets.module_of(Open(), TensorSpec(("N", "H"))).save(tmp_path / "open.tpm")

    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            blob = registry.blobs.put((tmp_path / "open.tpm").read_bytes())
            await registry.push(asked(blob), by="op")
            async with asyncio.timeout(WAIT_S):
                failed = await registry.wait_bundle(*KEY)
            assert failed.state is State.FAILED
            assert "give calibration" in failed.reason
            assert await registry.bundle(*KEY) == failed

    asyncio.run(main())


async def pushed(database, tmp_path):
    """digits@1, by a child that checks nothing."""
    async with registry_of(database, tmp_path, command=child(QUICK)) as registry:
        await registry.push(asked(registry.blobs.put(b"model")), by="op")


@pytest.mark.slow
def test_a_child_that_dies_is_tried_again_when_asked_and_given_up_at_last(sqlite, tmp_path):
    seen = tmp_path / "seen"

    async def main():
        await pushed(sqlite, tmp_path)
        command = child(COUNT.format(path=str(seen)))
        async with registry_of(sqlite, tmp_path, command=command) as registry:
            for _ in range(5):
                async with asyncio.timeout(WAIT_S):
                    failed = await registry.wait_bundle(*KEY)
                assert failed.state is State.FAILED
                assert "signal 9 (SIGKILL)" in failed.reason
            # A cloud that was asked again by somebody else says the same.
            assert (await registry.version("digits")).bundles == (failed,)

    asyncio.run(main())
    assert seen.read_text() == "..."


@pytest.mark.slow
def test_many_who_ask_at_once_get_one_conversion(sqlite, tmp_path):
    seen = tmp_path / "seen"

    async def main():
        await pushed(sqlite, tmp_path)
        command = child(COUNT.format(path=str(seen)))
        async with registry_of(sqlite, tmp_path, command=command) as registry:
            async with asyncio.timeout(WAIT_S):
                made = await asyncio.gather(*[registry.wait_bundle(*KEY) for _ in range(16)])
            assert {bundle.state for bundle in made} == {State.FAILED}

    asyncio.run(main())
    assert seen.read_text() == "."
    assert sqlite.read_now(lambda c: c.scalar(select(BUNDLES.c.attempts))) == 1


def test_a_child_that_takes_too_long_is_ended_with_its_group(sqlite, tmp_path):
    script = f"""
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open({str(tmp_path / "pid")!r}, "w").write(str(grandchild.pid))
time.sleep(1000)
"""

    async def main():
        await pushed(sqlite, tmp_path)
        command = child(script)
        async with registry_of(sqlite, tmp_path, command=command, convert_s=0.5) as registry:
            async with asyncio.timeout(WAIT_S):
                return await registry.wait_bundle(*KEY)

    failed = asyncio.run(main())
    assert "longer than 0.5 s" in failed.reason
    assert gone(int((tmp_path / "pid").read_text()))
    assert list((tmp_path / "work").iterdir()) == []


def gone(pid):
    """Whether the process ends, or is a corpse that only its parent has yet to see, in time."""
    stat = Path(f"/proc/{pid}/stat")
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (DIE, "signal 9"),
        ("import sys; sys.exit('out of luck')", "status 1: out of luck"),
        ("print('x' * (1 << 20))", "more than 65536 bytes"),
        ("", "status 0: it printed nothing"),
        ("print('no document')", "no valid answer"),
        ('print("[1]")', "no valid answer"),
        ("print('{}')", "no valid answer"),
        ("""print('{"done": {}}')""", "no valid answer"),
        ("""print('{"done": {"model_digest": "zz"}}')""", "no valid answer"),
    ],
)
def test_a_child_that_answers_nonsense_fails_the_push_only(sqlite, tmp_path, script, message):
    async def main():
        async with registry_of(sqlite, tmp_path, command=child(script)) as registry:
            with pytest.raises(Unavailable, match=message):
                await registry.push(asked(registry.blobs.put(b"m")), by="op")
            assert await registry.models() == []

    asyncio.run(main())


@pytest.mark.slow
def test_memory_beyond_the_limit_is_refused_with_its_figure(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, memory_bytes=80 << 20) as registry:
            blob = registry.blobs.put(model_bytes(tmp_path))
            with pytest.raises(Unavailable, match=r"80 MiB|Memory|memory|died|ended"):
                await registry.push(asked(blob), by="op")

    asyncio.run(main())


def test_stopping_ends_the_child_and_starting_converts_again(sqlite, tmp_path):
    async def main():
        await pushed(sqlite, tmp_path)
        async with registry_of(sqlite, tmp_path, command=child(HANG)) as registry:
            begun = await registry.bundle(*KEY)
            waiting = asyncio.create_task(registry.wait_bundle(*KEY))
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopping"):
            await waiting
        assert begun.state is State.CONVERTING
        async with registry_of(sqlite, tmp_path, command=child(DIE)) as registry:
            async with asyncio.timeout(WAIT_S):
                return await registry.wait_bundle(*KEY)

    assert "signal 9" in asyncio.run(main()).reason


CLOUD = """
import asyncio, sys
from pathlib import Path
from tests.cloud.registry.models import asked, child, registry_of
from tests.cloud.registry.test_conversions import HANG, KEY
from triplane.cloud.store import Database

async def main(url, folder):
    database = Database.open(url)
    async with registry_of(database, folder) as registry:
        await registry.push(asked(registry.blobs.put_file(folder / "lenet-0.tpm")), by="op")
    async with registry_of(database, folder, command=child(HANG)) as registry:
        await registry.bundle(*KEY)
        print("converting", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@SQLITE_FIRST
@pytest.mark.slow
def test_a_cloud_killed_while_converting_converts_when_it_is_back(database_url, tmp_path):
    model_bytes(tmp_path)
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", CLOUD, database_url, str(tmp_path)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    ) as cloud:  # fmt: skip
        assert cloud.stdout is not None
        assert cloud.stdout.readline() == b"converting\n"
        cloud.kill()
    database = Database.open(database_url)

    async def main():
        async with registry_of(database, tmp_path) as registry:
            before = (await registry.version("digits")).bundles
            async with asyncio.timeout(WAIT_S):
                return before, await registry.wait_bundle(*KEY)

    try:
        before, made = asyncio.run(main())
    finally:
        database.close()
    assert [bundle.state for bundle in before] == [State.CONVERTING]
    assert made.state is State.READY, made.reason
    assert list((tmp_path / "work").iterdir()) == []


def test_a_conversion_that_ends_the_cloud_every_time_is_given_up(sqlite, tmp_path):
    async def main():
        await pushed(sqlite, tmp_path)
        async with registry_of(sqlite, tmp_path, command=child(HANG)) as registry:
            await registry.bundle(*KEY)
        sqlite.write_now(lambda c: c.execute(update(BUNDLES).values(attempts=3)).rowcount)
        async with registry_of(sqlite, tmp_path, command=child(HANG)) as registry:
            return await registry.bundle(*KEY)

    failed = asyncio.run(main())
    assert failed.state is State.FAILED
    assert "begun 3 times" in failed.reason


@pytest.mark.slow
def test_a_model_file_that_was_damaged_in_the_store_is_not_converted(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            blob = registry.blobs.put(model_bytes(tmp_path))
            await registry.push(asked(blob), by="op")
            path = registry.blobs.find(blob)
            path.write_bytes(model_bytes(tmp_path, seed=1))
            async with asyncio.timeout(WAIT_S):
                return await registry.wait_bundle(*KEY)

    failed = asyncio.run(main())
    assert failed.state is State.FAILED
    assert "the cloud's copy of the model file is lost or damaged" in failed.reason


def test_the_command_names_the_child():
    assert COMMAND[-1] == converting.__name__
