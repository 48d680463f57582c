"""Small real model files, and a registry over them."""

import contextlib
import io
import secrets

import numpy as np
from tests.quantize import nets

from triplane.cloud.registry import Conversions, Limits, Push, Registry
from triplane.cloud.registry.conversions import COMMAND
from triplane.proto.transfer import BlobFolder

WAIT_S = 60


def model_bytes(tmp_path, seed=0):
    """A small convolutional network; every seed has other weights."""
    path = tmp_path / f"lenet-{seed}.tpm"
    if not path.exists():
        nets.module_of(nets.shaken(nets.LeNet(), seed), nets.IMAGE).save(path)
    return path.read_bytes()


def npz(**arrays):
    """Bytes of an .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def asked(blob, model="digits", **fields):
    """A push with a key of its own."""
    return Push(model=model, blob=blob, **{"key": secrets.token_bytes(16), **fields})


@contextlib.asynccontextmanager
async def registry_of(database, tmp_path, *, command=COMMAND, clock=None, **limits):
    """A started registry with blobs in `tmp_path`."""
    blobs = BlobFolder(tmp_path / "blobs")
    conversions = Conversions(tmp_path / "work", Limits(**limits), command)
    registry = Registry(database, blobs, conversions, **({"clock": clock} if clock else {}))
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop()
