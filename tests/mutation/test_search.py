"""`make deep SUITE=mutation`: break rules of the product at random; some test must go red.

Every rule is broken in a copy of the working tree, and the tests that cover its line run until the
first is red. What is done is kept in `.mutation/`, so an interrupted search goes on. The page of
evidence lists every rule that no test noticed, with the reason from `survivors.json`.

TRIPLANE_MUTANTS  how many rules (200)      TRIPLANE_HOURS  when to stop at the latest (3)
"""

import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.mutation.covering import TESTS, Covering, digest, environment, folders, record
from tests.mutation.sites import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".mutation"
EVIDENCE = ROOT / "docs" / "evidence" / "mutation.md"
REASONS = Path(__file__).with_name("survivors.json")
PRODUCT = ("proto", "unified_ir", "cloud", "edge", "device")
SEED = 2026
MUTANTS = int(os.environ.get("TRIPLANE_MUTANTS", "200"))
HOURS = float(os.environ.get("TRIPLANE_HOURS", "3"))
WORKERS = 2
LIMIT_S = 150.0  # for the tests of one rule
MAX_TESTS = 400

pytestmark = pytest.mark.deep


def test_rules_broken_at_random_turn_a_test_red():
    end_s = time.monotonic() + HOURS * 3600
    began_s = time.time()
    work = WORK / digest(ROOT / path for path in sources())
    work.mkdir(parents=True, exist_ok=True)
    covering = Covering([record(work, folder, WORKERS) for folder in folders()])
    results = searched(work, chosen(), covering, end_s)
    EVIDENCE.write_text(page(results, began_s))
    reasons = json.loads(REASONS.read_text())
    open_ = [row["rule"] for row in results if not row["red"] and row["rule"] not in reasons]
    assert len(results) == MUTANTS, f"{len(results)} of {MUTANTS} rules in {HOURS} hours; run again"
    assert open_ == [], "nothing noticed these; write a test, or the reason into survivors.json"


def sources() -> list[str]:
    listed = subprocess.check_output(["git", "ls-files", *PRODUCT], cwd=ROOT, text=True).split()
    return [p for p in listed if p.endswith(".py") and not p.endswith(("_pb2.py", "_pb2_grpc.py"))]


def chosen() -> list[Mutant]:
    every = [m for path in sources() for m in mutants_of(path, (ROOT / path).read_bytes())]
    return random.Random(SEED).sample(every, MUTANTS)


def searched(work, mutants, covering, end_s):
    """The rows of all rules, by number. One that no test noticed is tried again with new tests."""
    journal, tests = work / "results.jsonl", digest(TESTS.rglob("*.py"))
    lines = journal.read_text().splitlines() if journal.exists() else []
    rows = {row["number"]: row for row in map(json.loads, lines)}
    done = {n for n, row in rows.items() if row["red"] or row["with"] == tests}
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(WORKERS):
        copies.put(copied(work / f"copy-{number}"))

    def one(number):
        if time.monotonic() > end_s:
            return
        copy = copies.get()
        try:
            row = {"number": number, "with": tests, **tried(copy, mutants[number], covering)}
        finally:
            copies.put(copy)
        with journal.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows[number] = row
        sys.stderr.write(f"{len(rows)} of {len(mutants)}: {row['rule']}: {row['outcome']}\n")

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, (n for n in range(len(mutants)) if n not in done)))
    return [rows[number] for number in sorted(rows)]


def copied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for path in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if path and (ROOT / path).exists() | (ROOT / path).is_symlink():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


def tried(copy: Path, mutant: Mutant, covering: Covering) -> dict:
    source = (ROOT / mutant.path).read_bytes()
    row = {
        "rule": f"`{mutant.path}`, line {mutant.line}: {mutant.shown(source)}",
        "kind": mutant.kind,
        "red": False,
        "tests": 0,
    }
    tests = covering.tests(mutant.path, mutant.line)[:MAX_TESTS]
    if not tests:
        return {**row, "outcome": "no test runs the line"}
    (copy / mutant.path).write_bytes(mutant.applied(source))
    began_s = time.monotonic()
    try:
        code = run(copy, tests)
    except subprocess.TimeoutExpired:
        code = 0
    finally:
        (copy / mutant.path).write_bytes(source)
    seconds = time.monotonic() - began_s
    # 1: a test failed. 2, 3, 4: nothing could be imported, or these tests do not exist: then they
    # cannot be collected without the mutant either.
    red = code == 1 or (code in {2, 3, 4} and run(copy, [*tests, "--collect-only"]) == 0)
    outcome = "red" if red else ("no red in time" if seconds > LIMIT_S else "green")
    return {
        **row,
        "red": red,
        "tests": len(tests),
        "seconds": round(seconds, 1),
        "outcome": outcome,
    }


def run(copy: Path, tests: list[str]) -> int:
    """The exit code of the tests, in a process group that ends whole."""
    names = copy / ".mutation-tests"
    names.write_text("\n".join(tests))
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider",
        "--timeout=60", f"@{names}",
    ]
    # fmt: on
    env = environment(PYTHONPATH=f"{copy / '.ci' / 'namespace'}:{copy}")
    with subprocess.Popen(
        command,
        cwd=copy,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def page(rows, began_s) -> str:
    reasons = json.loads(REASONS.read_text())
    red, kinds = sum(row["red"] for row in rows), Counter(row["kind"] for row in rows)
    text = f"""# Rules broken at random

`make deep SUITE=mutation` at `{commit()}`, {time.strftime("%Y-%m-%d")}, seed {SEED}, \
{platform.machine()}, Python {platform.python_version()}; the last part took \
{(time.time() - began_s) / 60:.0f} minutes.

{len(rows)} rules of the product were broken, one at a time, drawn uniformly from its comparisons, \
conditions, numbers, operators, raised errors and calls whose result is not used. The tests that \
cover its line ran against each for at most {LIMIT_S:.0f} s, until one was red: {red} of \
{len(rows)} were noticed.

| kind | broken | noticed |
|---|---|---|
"""
    for kind, count in sorted(kinds.items()):
        noticed = sum(row["red"] for row in rows if row["kind"] == kind)
        text += f"| {kind} | {count} | {noticed} |\n"
    text += "\n## Not noticed\n\n| rule | tests that ran | why |\n|---|---|---|\n"
    for row in rows:
        if not row["red"]:
            ran, reason = f"{row['tests']} ({row['outcome']})", reasons.get(row["rule"], "open")
            text += f"| {row['rule']} | {ran} | {reason} |\n"
    return text
