"""The page docs/evidence/rounds.md, of the lines that the benchmarks of rounds kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from harness import table

MIB: Final = 1 << 20
SIDES: Final = ("ours", "again", "legacy", "superlink", "floor")
NAMES: Final = {
    "ours": "ours",
    "again": "ours, a second cloud",
    "legacy": "Flower's gRPC server",
    "superlink": "Flower's SuperLink",
    "floor": "TLS, a hash, a write and an fsync of each transfer",
}
PARTS: Final = {
    "device fetch": "devices: fetch the state, hash, check",
    "device model": "devices: keep the newest model",
    "device encode": "devices: encode the update, and write it where it implies something",
    "device upload": "devices: hash it, and send it where it is a file",
    "device acknowledge": "devices: until it is acknowledged",
    "device settle": "devices: settle it when it counted",
    "hash": "cloud: hash",
    "fsync": "cloud: fsync of files",
    "commit": "cloud: commits, their fsync included",
    "reduce": "cloud: reduce",
}


def page(kept: Sequence[dict[str, Any]]) -> str:
    """The whole page. The newest line of a case counts."""
    rounds = list({row["case"]["name"]: row for row in kept if "case" in row}.values())
    memory = [row for row in kept if "memory" in row]
    device = list({(r["device"], r["compression"]): r for r in kept if "device" in r}.values())
    rounds.sort(key=lambda row: (row["case"]["side"], row["case"]["devices"]))
    parts = {"conditions": rounds[0]["conditions"], "load": loads(rounds)}
    parts |= {"times": times(rounds), "split": split(rounds), "cost": cost(rounds)}
    parts |= {"memory": memories(memory), "device": devices(device)}
    return TEXT.format(**parts)


def loads(rows: Sequence[dict[str, Any]]) -> str:
    """Load of the machine before each case."""
    return ", ".join(f"{row['load']:.1f} before {label(row)}" for row in rows)


def label(row: dict[str, Any]) -> str:
    """A case's name for people."""
    case = row["case"]
    if case.get("masked"):
        return f"{case['devices']} devices, 23 kB, masked"
    size = "40 MB" if case["side"] > 1000 else "1 kB"
    return f"{case['devices']} devices, {size}"


def times(rows: Sequence[dict[str, Any]]) -> str:
    """A line a side and case."""
    lines = []
    for row in rows:
        for side in SIDES:
            if side not in row["ms"]:
                continue
            low, middle, high = row["ms"][side]
            ratio = row["ratio"].get(side)
            told = "" if ratio is None else "{median:.3g} ({q1:.3g} to {q3:.3g})".format(**ratio)
            target = f"{row['case']['target_ms']:g}" if side == "ours" else ""
            places = 1 if middle < 100 else 0
            spread = f"{middle:,.{places}f} ({low:,.{places}f} to {high:,.{places}f})"
            lines.append([label(row), NAMES[side], target, spread, told])
    return table(["round", "side", "target ms", "ms (quartiles)", "ours / side"], lines)


def split(rows: Sequence[dict[str, Any]]) -> str:
    """Parts of a round of ours."""
    lines = []
    for key, name in PARTS.items():
        lines.append([name, *(_parts(row, key) for row in rows)])
    return table(["ms a round", *(label(row) for row in rows)], lines)


def _parts(row: dict[str, Any], key: str) -> str:
    found = row["parts_ms"].get(key)
    if found is None:  # small updates ride in messages: nothing is uploaded
        return ""
    calls = row["parts_ms"].get(f"{key} calls")
    times_ = f", {calls / 1000:.0f} times" if calls else ""
    return f"{found:,.1f}{times_}"


def cost(rows: Sequence[dict[str, Any]]) -> str:
    """CPU, bytes and memory."""
    lines = []
    for row in rows:
        for side in (name for name in SIDES if name in row["ms"] and name != "again"):
            cpu, peak = row["cpu_ms"][side], row["peak_bytes"][side]
            wire = row["wire_bytes"][side]
            lines.append(
                [
                    label(row), NAMES[side], f"{cpu['server']:,.0f}", f"{cpu['devices']:,.0f}",
                    f"{wire['down'] / 1000:,.0f}", f"{wire['up'] / 1000:,.0f}",
                    f"{peak['server'] / MIB:,.0f}", f"{peak['devices'] / MIB:,.0f}",
                ]
            )  # fmt: skip
    head = ["round", "side", "server CPU ms", "devices CPU ms", "kB down", "kB up"]
    return table([*head, "server MiB", "devices MiB"], lines)


def memories(rows: Sequence[dict[str, Any]]) -> str:
    """A line a run."""
    lines = [
        [
            row["memory"], row["there"], found["devices"] or "none",
            f"{found['resident_bytes'] / MIB:.0f}", f"{found['anonymous_bytes'] / MIB:.0f}",
            f"{found['round_s']:.1f}" if found["devices"] else "",
            f"{found['cpu_s']:.1f}" if found["devices"] else "",
        ]
        for row in rows
        for found in row["rows"]
    ]  # fmt: skip
    head = ["update", "there", "in a round", "peak MiB", "anonymous MiB", "round s", "cloud CPU s"]
    return table(head, lines)


def devices(rows: Sequence[dict[str, Any]]) -> str:
    """A line a model."""
    lines = [
        [
            row["device"], row["compression"] or "none", f"{row['ready_s']:.2f}",
            f"{row['ready_cpu_s']:.2f}", f"{row['peak_bytes'] / MIB:.0f}",
            f"{row['most_bytes'] / MIB:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["parameters", "compression", "ready s", "ready CPU s", "peak MiB", "at most MiB"]
    return table(head, lines)


def lines_of(text: str) -> list[dict[str, Any]]:
    """What a file of kept lines says."""
    return [json.loads(line) for line in text.splitlines()]


TEXT: Final = """# Rounds in which nothing is learnt

`python benchmarks/rounds.py --keep FILE`, `rounds_memory.py --keep FILE`, `rounds_device.py --keep
FILE`, then `rounds.py --record FILE`. {conditions}. The machine's load before each case, which
includes the sides of the case before it: {load}.

## A round, beside Flower's

{times}

From the opening of a round to that of the next. All sides were up at once and took turns; a ratio
is of medians of two turns in the same place. The second cloud of ours is the control.

What is not equal:

* Ours has mutual TLS; a digest over every transfer and every file; an update is acknowledged after
  fsync and commit; a killed cloud goes on to the same bits. Its devices are the real client, all
  but the steps of learning. These updates imply no personal state and no remainder, so devices
  sync nothing in a round (decision 0039); those that do sync them before they leave.
* Flower's sides have TLS with a certificate of the server's only, no digest of their own over a
  transfer in the gRPC server's case, and nothing of a round on disk, but for the SuperLink's SQLite
  file. Their clients keep the round in memory.
* Our devices and the gRPC server's clients are two processes that are many devices each. The
  SuperLink has a process for each SuperNode and starts one for each message, as Flower deploys it;
  its rounds wait for polls of fixed lengths. It was not run with 100 devices: by the figures below
  a hundred SuperNodes would take 30 GB, which this machine has not.
* Every update is as large as the state: float32, not compressed. Ours changes each number by a
  constant, so that every round has a state of its own; Flower's clients answer zeros, whose equal
  chunks the SuperLink sends once: it moved a third of the 80 MB each way.

## Where the time of ours goes

{split}

Summed over threads and devices that wait for each other and for the processor, so they overlap and
do not add up to the round.

## What it costs

{cost}

CPU of a round by part. Bytes are on the wire, TLS included, counted by a relay in a pass of its
own. Memory is the sum over processes of the most that each had resident.

## Memory of the cloud, a thousand devices there

![peak memory over the devices of a round](rounds-memory.svg)

{memory}

The peak of the process during a short run; `anonymous` is what no file backs. With 1 kB a round of
300 takes little more than one of 10. With 1 MB it takes more: updates are spooled to disk and
mapped, and each of 300 uploads at once has a chunk of up to 1 MiB in memory; how much of the growth
these are was not measured. Most of what the first run adds stays, whatever its size; what it is was
not looked into. These rows are of an earlier commit of the same day.

## The device process

{device}

`python -m triplane.device` in a real run of three rounds with real steps, scored at the end: ready
is the median of five starts, the peak that of the last process. The bound is 150 MiB and five times
the parameters. An update that is compressed to int8 comes closest: its remainder, its sum with the
change and what it stands for are in memory at once.
"""
