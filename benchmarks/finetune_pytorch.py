"""The same fine-tuning process in PyTorch: imports it, builds the network, loads, steps."""

import sys
import time

BORN = float(sys.argv[2])

import json  # noqa: E402 - the clock starts before the first import
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

torch.nn.Linear  # noqa: B018 - as the other side resolves what it uses
imported = time.monotonic() - BORN, time.process_time()

from networks import CASES  # noqa: E402
from side_pytorch import side  # noqa: E402


def resident() -> int:
    """Resident bytes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


step, _ = side(CASES[sys.argv[3]])
with np.load(Path(sys.argv[1]).with_suffix(".npz")) as held:
    batches = list(zip(held["x"], held["y"], strict=True))
first = [step(*batches[0])]
stepped = time.monotonic() - BORN, time.process_time()
losses = [step(*b) for b in batches[1:]]
done = time.monotonic() - BORN, time.process_time()
print(
    json.dumps(
        {"import": imported, "first": stepped, "all": done, "resident": resident(),
         "losses": [*first, *losses], "heavy": []}
    )
)  # fmt: skip
