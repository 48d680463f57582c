"""Rounds in which nothing is learnt, beside Flower's SuperLink and its gRPC server of before.

    python benchmarks/rounds.py                  # 3, 10, 100 devices; 40 MB with 2 devices; masked
    python benchmarks/rounds.py --only 10        # one of them
    python benchmarks/rounds.py --ours           # without Flower, which then need not be there
    python benchmarks/rounds.py --keep FILE      # also as a line of JSON a case
    python benchmarks/rounds.py --record FILE    # the kept cases into docs/evidence/rounds.md

Every side is a server process and devices in processes of their own, all started before the first
figure. They take turns, a few rounds each, in an order that rotates; a ratio is of the medians of
two turns in the same place, so what drifts cancels. `again` is a second cloud of ours: the control.
Where the model is large, `floor` is what no round can do without (`rounds_floor.py`).
Bytes are counted afterwards by a relay that stands between nothing that is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import rounds_flower
from harness import machine, ratio
from rounds_floor import floor
from rounds_ours import Ours, ours
from rounds_record import lines_of, page
from rounds_relay import Relay, relaying
from rounds_sides import Case, Side, Turn, end_in_order, per_round

from triplane.unified_ir.federated.core.files import INLINE_BYTES

EVIDENCE: Final = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "rounds.md"
TURNS: Final = 5
WARM: Final = 1
"""Turns that do not count: connections, plans and caches."""
COUNTED: Final = 1
"""Turns whose bytes are counted."""

CASES: Final = (
    Case("3", 3, 16, 10, 10.0),
    Case("10", 10, 16, 8, 20.0),
    Case("100", 100, 16, 3, 200.0, flower=0),
    Case("40mb", 2, 3162, 2, 500.0),
    Case("masked", 6, 75, 5, 100.0, flower=0, masked=True),
)
Start = Callable[[Path, Case, Relay | None], AbstractContextManager[Side]]
FLOWER: Final[dict[str, Start]] = {
    "legacy": rounds_flower.legacy,
    "superlink": rounds_flower.superlink,
}


def sides_of(case: Case, *, flower: bool) -> dict[str, Start]:
    """Who takes part."""
    found: dict[str, Start] = {"ours": ours, "again": ours}
    if flower and not case.masked:
        found["legacy"] = FLOWER["legacy"]
    if flower and case.flower:
        found["superlink"] = FLOWER["superlink"]
    if case.parameter_bytes > INLINE_BYTES:
        found["floor"] = floor
    return found


def rounds_of(name: str, case: Case) -> int:
    """In a turn."""
    return case.flower if name == "superlink" else case.rounds


def taking_turns(sides: dict[str, Side], case: Case, turns: int) -> Iterator[dict[str, Turn]]:
    """A turn of each side, again and again; the order rotates."""
    names = list(sides)
    for i in range(turns):
        shift = i % len(names)
        order = names[shift:] + names[:shift]
        yield {name: sides[name].turn(rounds_of(name, case)) for name in order}


def measured(case: Case, *, flower: bool) -> dict[str, Any]:
    """Everything of one case."""
    starts = sides_of(case, flower=flower)
    with tempfile.TemporaryDirectory(prefix="tr-") as name, ExitStack() as stack:
        folder = Path(name)
        sides = {
            side: stack.enter_context(start(folder / side, case, None))
            for side, start in starts.items()
        }
        for _ in taking_turns(sides, case, WARM):
            pass
        first = sides["ours"]
        assert isinstance(first, Ours)
        before, opened = parts_s(first), first.opened
        turns = list(taking_turns(sides, case, TURNS))
        parts = per_round(before, parts_s(first), first.opened - opened)
        peaks = {side: found.peak_bytes() for side, found in sides.items()}
    row: dict[str, Any] = {"case": asdict(case), "parts_ms": parts, "peak_bytes": peaks}
    row |= figures({side: [turn[side] for turn in turns] for side in starts})
    row["wire_bytes"] = {
        side: wire_bytes(start, case, rounds_of(side, case))
        for side, start in starts.items()
        if side != "again"
    }
    return row


def parts_s(side: Ours) -> dict[str, float]:
    """Seconds of each part so far, the devices' as of the end of the last turn."""
    return side.parts_s() | side.spent_s


def figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Times, CPU and ratios of all sides."""
    medians = {side: [statistics.median(t.ms) for t in found] for side, found in turns.items()}
    spread = {side: [x for turn in found for x in turn.ms] for side, found in turns.items()}
    return {
        "ms": {side: quartiles(found) for side, found in spread.items()},
        "ratio": {
            side: asdict(ratio(medians["ours"], found))
            for side, found in medians.items()
            if side != "ours"
        },
        "cpu_ms": {
            side: {
                part: statistics.median(turn.cpu_ms[part] for turn in found)
                for part in ("server", "devices")
            }
            for side, found in turns.items()
        },
    }


def quartiles(found: list[float]) -> list[float]:
    """First, median, third."""
    return statistics.quantiles(found, n=4) if len(found) > 1 else found * 3


def wire_bytes(start: Start, case: Case, rounds: int) -> dict[str, float]:
    """On the wire per round, TLS included, to the devices and from them."""
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        relaying() as relay,
        start(Path(name) / "side", case, relay) as side,
    ):
        side.turn(rounds)
        down, up = relay.down, relay.up
        done = sum(side.turn(rounds).rounds for _ in range(COUNTED))
        return {"down": (relay.down - down) / done, "up": (relay.up - up) / done}


def conditions(*, flower: bool) -> str:
    """What the figures were taken on and with."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf", "numpy"))
    theirs = f"; {rounds_flower.version()}" if flower else ""
    return f"{'; '.join(machine().values())}; {packages}{theirs}"


def main() -> None:
    """Measures and prints one line of JSON a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--ours", action="store_true", help="without Flower")
    parser.add_argument("--keep", type=Path, default=Path(os.devnull))
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"into {EVIDENCE.name}")
    options = parser.parse_args()
    if options.record:
        EVIDENCE.write_text(page(lines_of(options.record.read_text())))
        return
    end_in_order()
    for case in CASES:
        if case.name not in (options.only or [case.name]):
            continue
        load = os.getloadavg()[0]
        row = measured(case, flower=not options.ours)
        row |= {"conditions": conditions(flower=not options.ours), "load": load}
        print(json.dumps(row), flush=True)
        with options.keep.open("a") as kept_file:
            kept_file.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
