"""One process of a run: `LAYOUT,.. FOLDER one` with two devices, or `I/2 HOST:PORT` with one each.

Each trains the same network in these layouts, and leaves losses and state.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tests.support.xla_training import Net, digits

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines.xla import ready_times
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.engines.xla.hosts import Hosts
from triplane.unified_ir.engines.xla.processes import join
from triplane.unified_ir.train.snapshot import Snapshot

LAYOUTS: Any = {
    "whole": ({}, 1, 197, 18),
    "split": ({"shard": {"*.weight": ("data", None), "optimizer.*": ("data",)}}, 4, 160, 20),
    "bucketed": ({"buckets": 2048}, 3, 160, 20),
    "measured": ({"buckets": "auto"}, 3, 160, 20),
    "planned": ({"parallel": "auto"}, 1, 160, 20),
}
"""By name: options of the engine, steps per launch, samples, batch size.

The last batch of "whole" has 17 rows, which two devices cannot share.
"""


def trainer(engine, rate=0.05, **options):
    nn.seed(3)
    chosen: Any = {"engine": engine, "seed": 1, **options}
    loss, optimizer = nn.SoftmaxCrossEntropy(), optim.SGD(rate, momentum=0.9)
    return train.Trainer(Net(), loss=loss, optimizer=optimizer, **chosen)


def trained(engine, place, steps_per_launch, samples, batch_size):
    record, history = train.Record(), train.HistoryFile(place / "history.json")
    folder = place.parent
    options: Any = {"callbacks": [record, history], "steps_per_launch": steps_per_launch}
    run = trainer(engine, **options)
    held_out = digits(0, 40)
    run.fit(
        digits(0, samples), 3, batch_size=batch_size, validation=held_out, checkpoint=folder / "run"
    )
    return {"loss": np.array([row["loss"] for row in record.steps]), **run.state()}


def refused(hosts, folder):
    """What goes wrong between processes must be refused in both."""
    process = hosts.process
    engine = XlaEngine(hosts=hosts)
    with pytest.raises(Conflict, match=r"process 2 differs from process 1 in its optimizer: .*0.2"):
        trainer(engine, rate=0.1 * process).fit(digits(0, 40), 1, progress="none")
    with pytest.raises(Conflict, match="process 2 differs from process 1 in its data"):
        trainer(engine).fit(digits(0, 40 * process), 1, progress="none")
    stop = train.EarlyStop("loss", patience=process)
    with pytest.raises(Conflict, match=r"in its early stop: patience 2 .* there, patience 1 "):
        trainer(engine, callbacks=[stop]).fit(digits(0, 40), 1, progress="none")
    mine: Any = {"batch_size": 20, "checkpoint": folder / "split" / ("run", "none")[process - 1]}
    with pytest.raises(Conflict, match=r"in its checkpoint: none, .* there, step 24, epoch 3"):
        trainer(engine).fit(digits(0, 160), 1, progress="none", **mine)
    assert join(hosts).devices_per_host == 2  # both processes are on one machine
    planned: Any = XlaEngine(hosts=hosts, parallel="auto")
    assert "devices_per_host=2" in planned.devices.layout
    with pytest.raises(InvalidInput, match="uses all their devices, 2, got 1"):
        XlaEngine(hosts=hosts, mesh={"data": 1})
    with pytest.raises(Conflict, match="already process"):
        XlaEngine(hosts=Hosts(coordinator=hosts.coordinator, process=1, count=9))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spec = PartitionSpec("data")
    scatter = jax.shard_map(
        lambda state, x: jax.lax.psum_scatter(x, "data", tiled=True) + state,
        mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec,
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=r"wrong sums without an error, and XLA compiled one, %"):
        join(hosts).checked(jax.jit(scatter))(np.float32(0), np.zeros(8, np.float32))


def lie(*, is_first):
    """Let clocks differ: by that of the first process there are several buckets, else there is one.

    By the other clock, the parts of the step run more often, too.
    """
    order: dict[Any, float] = {}

    def seconds(run):
        run()
        return order.setdefault(run, len(order) + 1.0) if is_first else 0.0

    ready_times._seconds = seconds


def main():
    layouts, folder, which, *coordinator = sys.argv[1:]
    own: Any = {"mesh": {"data": 2}}
    if coordinator:
        process, count = map(int, which.split("/"))
        hosts = Hosts(coordinator=coordinator[0], process=process, count=count)
        if process > 1:
            Snapshot.write = None  # type: ignore[assignment,method-assign]
        own = {"hosts": hosts}
    for name in layouts.split(","):
        options, *sizes = LAYOUTS[name]
        lie(is_first=not coordinator or process == 1)
        place = Path(folder, name, which.replace("/", "of"))
        place.mkdir(parents=True)
        chosen = {k: v for k, v in own.items() if k != "mesh" or "parallel" not in options}
        engine: Any = XlaEngine(**chosen, **options)
        state = trained(engine, place, *sizes)
        if name == "measured":
            assert len(engine.devices.plans[0].buckets) > 1
        np.savez(place / "end.npz", **state, **engine.state_dict())
    if coordinator and "split" in layouts:
        refused(hosts, Path(folder))
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
