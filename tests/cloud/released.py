"""A cloud with one released model, made once and copied for each test."""

import asyncio
import shutil

from tests.cloud.registry.models import model_bytes

from triplane.cloud.cli.connection import calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.home import Home, initialize
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.cloud.trust.signing import sign_release

WAIT_S = 120
VERSIONS = (1, 2)


def make_released(folder, **signing):
    """HOME and KEYS in `folder`: digits@1 and digits@2, converted for ort-x64 and signed."""
    made = initialize(folder / "home", offline_keys=folder / "keys", **signing)
    asyncio.run(asyncio.wait_for(_release(made.home, folder), WAIT_S))
    return folder


async def _release(home, folder):
    async with running(home) as cloud:
        for version in VERSIONS:
            blob = cloud.blobs.put(model_bytes(folder, seed=version))
            push = Push(model="digits", blob=blob, key=bytes([version]) * 16)
            await cloud.registry.push(push, by="operator")
            await cloud.registry.wait_bundle("digits", version, "ort-x64")
            await asyncio.to_thread(_sign, home, version, folder / "keys")


def _sign(home, version, keys):
    with calls(home.operator) as cloud, remote_at(cloud) as remote:
        assert sign_release(remote, f"digits@{version}", "ort-x64", keys).submitted.published


def copied(released, folder):
    """A cloud of the test's own, and its KEYS, which remember what they signed."""
    for name in ("home", "keys"):
        shutil.copytree(released / name, folder / name)
    return Home(folder / "home")
