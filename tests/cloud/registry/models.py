"""Small real model files, children that answer at once or die, and a registry over them."""

import contextlib
import io
import secrets
import sys

import numpy as np
from tests.quantize import nets

from triplane.cloud.registry import ConversionLimits, Conversions, Push, Registry
from triplane.cloud.registry.conversions import COMMAND
from triplane.proto.blobs import BlobFolder

WAIT_S = 60

QUICK = """
import hashlib, json, sys
order = json.loads(sys.stdin.readline())
data = open(order["model"], "rb").read()
print(json.dumps({"done": {"model_digest": hashlib.sha256(data).hexdigest()}}))
"""
"""Checks nothing; for tests of what the registry does with a sound file."""


def child(script):
    """The command of a child that is a few lines of Python."""
    return (sys.executable, "-I", "-S", "-c", script)


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
async def registry_of(database, tmp_path, *, command=COMMAND, **limits):
    """A started registry with blobs in `tmp_path`."""
    blobs = BlobFolder(tmp_path / "blobs")
    conversions = Conversions(tmp_path / "work", ConversionLimits(**limits), command)
    registry = Registry(database, blobs, conversions)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop()
