"""Federated runs as text: one line, tables of rounds and devices, what changed, how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.text import age, duration, enum_text, shown, size, table
from triplane.cloud.cli.watching import Watchable, bar, live_view, styled_table
from triplane.proto.federation_pb2 import GetRunRequest, Member, Round, Run, Spread
from triplane.unified_ir.federated.core.metric import ACCURACY, Metric, Scores, metric_named
from triplane.unified_ir.federated.privacy.report import spent_text

ROUND_HEADINGS: Final = (
    "ROUND", "ASKED", "COUNTED", "OUT", "LOSS", "TIME", "UP", "DOWN", "ACCURACY",
)  # fmt: skip
MEMBER_HEADINGS: Final = ("DEVICE", "EXAMPLES", "COUNTED", "DROPPED", "BEFORE", "AFTER", "WHY")
RUN_HEADINGS: Final = ("RUN", "MODEL", "ALGORITHM", "PHASE", "ROUND", "BEGUN", "RESULT", "REASON")
OVER: Final = ("done", "failed")
INACTIVE: Final = (*OVER, "stopped")
"""Phases in which nothing changes by itself."""
LAST_ROUNDS: Final = 20
MOST_MEMBERS: Final = 50
MOST_REASONS: Final = 3
"""Largest number of devices whose reasons are printed after a round; `show` prints all."""
MOST_REASON_CHARS: Final = 300
MOST_LOSS: Final = 1e6
"""Larger numbers are printed with an exponent."""
LINES_AROUND: Final = 14
OFF: Final = "off"
# fmt: off
STYLES: Final = {
    "done":       "bold green",
    "stopped":    "bold yellow",
    "failed":     "bold red",
}
# fmt: on


def phase_of(run: Run) -> str:
    """Return the phase of a run, such as "collecting"."""
    return enum_text(run, "phase")


def means(run: Run) -> str:
    """Return "maml", or "FedAdam over fedavg" where a strategy of Flower decides."""
    spec = run.spec
    if not spec.HasField("flower"):
        return spec.algorithm
    return f"{spec.flower.strategy} over {'ClientApp' if spec.flower.app else spec.algorithm}"


def headline(run: Run) -> str:
    """Summarize a run's spec, progress and reason in one line."""
    spec, phase = run.spec, phase_of(run)
    parts = [f"{means(run)} on {spec.model} with {spec.population}: {phase}"]
    if phase not in {"preparing", *OVER}:
        parts.append(f"round {min(run.round, spec.rounds)} of {spec.rounds}")
    if spec.robustness.norm_bound == OFF:
        parts.append("no norm bound: one device can replace the model")
    if run.HasField("epsilon_spent"):
        noise = spec.noise
        parts.append(spent_text(run.epsilon_spent, noise.epsilon, noise.delta))
    if not run.roster and phase not in INACTIVE:
        parts.append("no roster: nothing protects from a cloud that invents devices")
    if spec.HasField("masking"):
        groups = f", in {spec.masking.groups} groups" if spec.masking.groups else ""
        least = spec.masking.least
        parts.append(f"masked: the cloud learns sums over {least} or more devices{groups}")
    parts += scoring(run)
    if run.members:
        connected = sum(member.connected for member in run.members)
        devices = "device" if len(run.members) == 1 else "devices"
        parts.append(f"{connected} of {len(run.members)} {devices} connected")
    if run.result:
        parts.append(f"result {run.result}")
    if run.reason:
        parts.append(run.reason)
    return shown(f"[{run.id}] {', '.join(parts)}")


def scoring(run: Run) -> list[str]:
    """Return what a run's scores tell beside its updates, and whether nobody scored its result."""
    spec, parts = run.spec, []
    if spec.scores == Scores.OFF:
        return ["devices do not score"]
    if spec.HasField("masking") and spec.scores != Scores.MASKED:
        parts.append("the cloud sees each device's scores")
    if spec.HasField("noise"):
        parts.append("epsilon does not cover scores")
    ended = [r for r in run.rounds if r.closed_s]
    if phase_of(run) == "done" and ended and not (ended[-1].evaluates and ended[-1].counted):
        parts.append("no device scored the result")
    return parts


def masking_lines(run: Run) -> list[str]:
    """Return what the masking of a run holds for its usual cohort, in lines; none without it."""
    from triplane.cloud.federation.masked_spec import masking_text

    return masking_text(run.spec).splitlines() if run.spec.HasField("masking") else []


def metric_of_run(run: Run) -> Metric:
    """Return the metric of the scores of a run."""
    return metric_named(run.metric)


def round_headings(run: Run) -> tuple[str, ...]:
    """Return the headings of a table of rounds, the last of which names the metric."""
    return (
        (*ROUND_HEADINGS[:-1], f"HELD-OUT {run.metric.upper()}") if run.metric else ROUND_HEADINGS
    )


def round_row(round_: Round, metric: Metric = ACCURACY) -> tuple[str, ...]:
    """Return the row of one round."""
    out = round_.refused + round_.late + round_.lost
    took = duration_text(round_.closed_s - round_.opened_s) if round_.closed_s else ""
    # 0 is not known: masked updates tell no loss.
    learnt = loss_text(round_.loss) if round_.loss and not round_.evaluates else ""
    return (
        f"{round_.number}{' scored' if round_.evaluates else ''}",
        str(round_.asked),
        str(round_.counted),
        str(out) if out else "",
        learnt,
        took,
        size(round_.bytes_up) if round_.bytes_up else "",
        size(round_.bytes_down) if round_.bytes_down else "",
        round_.returned or round_.given_up or scores(round_, metric) or noted(round_),
    )


def noted(round_: Round) -> str:
    """Return "2 updates above the norm bound", what is said of a masked round, or nothing."""
    if not round_.scaled:
        bound = f"norm bound {round_.norm_bound:.3g}" if round_.norm_bound else ""
        left_out = f"left out: {round_.left_out}" if round_.left_out else ""
        return ", ".join(filter(None, (bound, left_out)))
    return f"{round_.scaled} update{'s' if round_.scaled > 1 else ''} above the norm bound"


def loss_text(loss: float) -> str:
    """Format a loss as "0.3122"; the one a device claims may have three hundred digits."""
    return f"{loss:.4f}" if abs(loss) < MOST_LOSS else f"{loss:.2e}"


def duration_text(seconds: float) -> str:
    """Format a length of time as "35 ms" or "2.4 s"; a longer one as `duration` does."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else duration(seconds)


def scores(round_: Round, metric: Metric) -> str:
    """Format the scores before and after adaptation in an evaluating round."""
    if not round_.HasField("after"):
        return ""
    return f"{_spread(round_.before, metric)} -> {_spread(round_.after, metric)}"


def _spread(spread: Spread, metric: Metric) -> str:
    mean = metric.text_with_unit(spread.mean)
    if spread.masked:
        return f"{mean} (masked)"
    return f"{mean} (worst tenth {metric.text_with_unit(spread.worst_tenth)})"


def member_row(
    member: Member, metric: Metric = ACCURACY, *, is_masked: bool = False
) -> tuple[str, ...]:
    """Return the row of one device. is_masked: nobody knows its scores."""
    scored, unknown = member.HasField("score"), "masked" if is_masked else ""
    declined = f", {member.declined} declined" if member.declined else ""
    return (
        member.device + ("" if member.connected else " (away)"),
        str(member.examples),
        str(member.counted),
        f"{member.dropped}{declined}" if member.dropped else "",
        metric.text_with_unit(member.score.before) if scored else unknown,
        metric.text_with_unit(member.score.after) if scored else unknown,
        cut(f"waits: {member.waits}" if member.waits else why_text(member)),
    )


def why_text(member: Member) -> str:
    """Return why contributions did not count, with counts, the most frequent reason first."""
    reasons = sorted(member.why, key=lambda why: -why.count)
    return "; ".join(f"{why.count} x {why.reason}" for why in reasons) or member.reason


def cut(text: str) -> str:
    """Cut a text to a bounded length."""
    return text if len(text) <= MOST_REASON_CHARS else text[: MOST_REASON_CHARS - 3] + "..."


def drop_reasons(before: Run | None, after: Run) -> list[str]:
    """Return new reasons, since `before`, why devices' newest contributions did not count."""
    return _new(before, after, lambda member: member.reason)


def waiting(before: Run | None, after: Run) -> list[str]:
    """Return new reasons, since `before`, why devices cannot work at the moment."""
    return _new(before, after, lambda member: f"waits: {member.waits}" if member.waits else "")


def _new(before: Run | None, after: Run, text_of: Callable[[Member], str]) -> list[str]:
    known = {member.device: text_of(member) for member in before.members} if before else {}
    texts = [(m.device, text_of(m)) for m in after.members]
    texts = [(device, text) for device, text in texts if text and text != known.get(device)]
    lines = [shown(f"    {device}: {cut(text)}") for device, text in texts[:MOST_REASONS]]
    if len(texts) > MOST_REASONS:
        lines.append(f"    and {len(texts) - MOST_REASONS} more devices; triplane federate show")
    return lines


def refusals(run: Run) -> list[str]:
    """Return one line for each kind of refused contribution."""
    return [shown(f"  {r.count} {r.kind}: {r.newest}") for r in run.refusals.reasons]


def run_text(run: Run) -> str:
    """Describe a run with its last rounds and its devices."""
    when = f"begun {age(run.started_s)} by {run.started_by}"
    if run.ended_s:
        when += f", took {duration_text(run.ended_s - run.started_s)}"
    lines = [headline(run), *masking_lines(run), shown(when)]
    metric = metric_of_run(run)
    if run.rounds:
        rows = [round_row(r, metric) for r in run.rounds[-LAST_ROUNDS:]]
        lines += ["", table(round_headings(run), rows)]
    if run.members:
        is_masked = run.spec.scores == Scores.MASKED
        rows = [member_row(m, metric, is_masked=is_masked) for m in run.members[:MOST_MEMBERS]]
        lines += ["", table(MEMBER_HEADINGS, rows)]
    if len(run.members) > MOST_MEMBERS:
        lines.append(f"and {len(run.members) - MOST_MEMBERS} more; all of them with --json")
    if run.refusals.reasons:
        lines += ["", "refused:", *refusals(run)]
    return "\n".join(lines)


def run_table(runs: Sequence[Run]) -> str:
    """Return a table with one line for each run."""
    rows = [
        (
            run.id,
            run.spec.model,
            means(run),
            phase_of(run),
            f"{min(run.round, run.spec.rounds)} of {run.spec.rounds}",
            age(run.started_s),
            run.result,
            run.reason,
        )
        for run in runs
    ]
    return table(RUN_HEADINGS, rows)


def changes(before: Run | None, after: Run) -> list[str]:
    """Return lines about what is new in `after`, for output that cannot be redrawn."""
    # A repeated round has the same number, so the time of its opening is part of the identity.
    known = (
        {(r.number, r.evaluates, r.opened_s) for r in _closed_rounds(before)} if before else set()
    )
    lines = [
        shown("  round " + "  ".join(filter(None, _round_facts(round_, metric_of_run(after)))))
        for round_ in _closed_rounds(after)
        if (round_.number, round_.evaluates, round_.opened_s) not in known
    ]
    if lines:
        lines += drop_reasons(before, after)
    lines += waiting(before, after)
    if before is None or _progress(before) != _progress(after):
        lines.append(headline(after))
    return lines


def _closed_rounds(run: Run) -> list[Round]:
    return [round_ for round_ in run.rounds if round_.closed_s]


def _round_facts(round_: Round, metric: Metric) -> list[str]:
    number, asked, counted, out, loss, took, up, down, rest = round_row(round_, metric)
    if not metric.share and round_.HasField("after"):
        rest = f"held-out {metric.name} {rest}"
    return [
        number,
        f"{counted} of {asked}",
        f"{out} out" if out else "",
        f"loss {loss}" if loss else "",
        took,
        f"{up} up" if up else "",
        f"{down} down" if down else "",
        rest,
    ]


def _progress(run: Run) -> tuple[str, str, str]:
    """Return the state whose change prints a new line; phases within a round do not."""
    phase = phase_of(run)
    busy = phase in {"gathering", "collecting", "reducing"}
    return ("learning" if busy else phase, run.result, "" if phase == "collecting" else run.reason)


def aftermath(run: Run) -> list[str]:
    """Describe the outcome of a run that stopped, and the next command."""
    if phase_of(run) == "done" and run.spec.release:
        return ["It is released automatically, under the policy: triplane rollout show"]
    if phase_of(run) == "done":
        sign = f"triplane sign {run.result} --keys DIR, where the keys are"
        return [f"Serve it: {sign}; then: triplane deploy {run.result} --to SELECTOR"]
    if phase_of(run) == "stopped":
        return [f"  continue where it stopped:  triplane federate resume {run.id}"]
    return refusals(run)


def watchable(cloud: Calls, run_id: str) -> Watchable[Run]:
    """Describe how a run is watched."""
    return Watchable(
        name=f"run {run_id}",
        watch=f"triplane federate watch {run_id}",
        stop=f"triplane federate stop {run_id}",
        stream=lambda: cloud.federation.WatchRun(GetRunRequest(id=run_id)),
        state_of=phase_of,
        stopped=INACTIVE,
        headline=headline,
        changes=changes,
        aftermath=aftermath,
        live=lambda: live_view(draw_in),
    )


def draw_in(run: Run, lines: int, _seconds: float) -> RenderableType:
    """See `watching.Draw`."""
    return draw(run, room=max(3, lines - LINES_AROUND), now_s=time.time())


def draw(run: Run, *, room: int, now_s: float) -> RenderableType:
    """Draw the headline, bars of the run and its current round, and at most `room` rounds."""
    title = Text(headline(run), STYLES.get(phase_of(run), "bold"))
    done = sum(
        1 for r in run.rounds if r.closed_s and not (r.evaluates or r.given_up or r.returned)
    )
    lines = [title, Text("  rounds   ") + bar(done, run.spec.rounds)]
    if run.rounds and not run.rounds[-1].closed_s:
        newest = run.rounds[-1]
        # Not below 0: the clock of this machine may differ from the cloud's.
        left_s = max(0.0, newest.opened_s + run.spec.cohort.deadline_s - now_s)
        devices = Text("  devices  ") + bar(newest.counted, newest.asked)
        lines.append(devices.append(f", {left_s:.0f} s to the deadline", "dim"))
    closed = [r for r in run.rounds if r.closed_s]
    rows = (
        (
            [shown(cell) for cell in round_row(r, metric_of_run(run))],
            "red" if r.given_up or r.returned else "",
        )
        for r in closed[-room:]
    )
    reasons = (Text(line, "red") for line in (*drop_reasons(None, run), *refusals(run)))
    return Group(*lines, Text(), styled_table(round_headings(run), rows), *reasons)
