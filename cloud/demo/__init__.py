"""`triplane demo`: one model from training to a fleet of nodes, and on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from triplane.unified_ir.cli.shell import json_option, open_output

EPILOG = """\b
Examples:
  triplane demo
  triplane demo --data mnist-folder --epochs 3 --keep demo-files
"""


@click.command("demo", epilog=EPILOG)
@click.option(
    "--data", default="digits", show_default=True, metavar="DATA",
    help="'digits' (ships with the package), a .npz with x and y, a folder of MNIST IDX files, "
    "or a folder of images with one sub-folder per class. Grey images of at least 8x8; larger "
    "ones are averaged down.",
)  # fmt: skip
@click.option(
    "--epochs", type=click.IntRange(1), default=12, show_default=True, metavar="N",
    help="Passes over the training data.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(50), default=100, show_default=True, metavar="N",
    help="Rounds of federated learning, for each of two algorithms.",
)  # fmt: skip
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Keep all files (model, bundles, plan, charts, cloud, nodes) in this folder, and on a "
    "terminal leave the fleet running until Ctrl-C; otherwise they are removed.",
)  # fmt: skip
@json_option
def command(*, as_json: bool, **options: Any) -> None:
    """Carry a digit reader through the whole platform, on real data, in a few minutes.

    Trains a small convolutional network, writes it as one file, damages a copy to show the
    refusal, converts it to float and int8 bundles, serves one over gRPC and asks it with a stock
    client, then fine-tunes the model for a changed camera in a process that holds nothing but
    onnxruntime, numpy, protobuf and our runtime.

    Then it starts a cloud and two nodes, enrolls the nodes over mutual TLS, signs the model away
    from the cloud and rolls it out; releases a bad version, which the nodes refuse, so that its
    rollout pauses; and kills a node's agent in the middle of the next one.

    Last, six device processes learn a second model together, by federated averaging and by exact
    meta-learning, while two of them are killed and one comes back. Their updates are clipped and
    masked: the cloud sees sums of at least three devices only. The result is released automatically
    under the signed policy, and each node adapts it to its own samples while a client calls it.

    Every step runs the real command; nothing is left running. With --keep on a terminal the fleet
    stays up, with its dashboard, until Ctrl-C.
    """
    from triplane.cloud.demo.story import tell

    output = open_output(as_json)
    tell(output=output, **options)
