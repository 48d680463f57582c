"""The status of a device for `triplane device status`: its name, model and pending updates."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from triplane.device.home import DeviceHome, SessionNote
from triplane.device.memory import Memory, UpdateFacts
from triplane.device.model import DeviceModel, ModelChoice
from triplane.unified_ir.federated.core.metric import ACCURACY, metric_named


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The status of a device. renew_at_s: seconds since 1970. key: see `DeviceIdentity`.

    population: that of the running process, or else of the settings. session: None if no process
    is running.
    """

    name: str
    cloud: str
    home: str
    population: str
    renew_at_s: float
    running: bool
    session: SessionNote | None
    model: ModelChoice | None
    pending: tuple[UpdateFacts, ...]
    key: str

    def record(self) -> Mapping[str, object]:
        """Return the status for scripts."""
        model = {"model": self.model.record()} if self.model else {}
        return asdict(self) | model

    def text(self) -> str:
        """Return the status for people."""
        lines = [
            f"{self.name}  population {self.population}, cloud {self.cloud}",
            f"  home    {self.home}  ({'running' if self.running else 'not running'})",
            f"  work    {_work(self.session)}",
            f"  model   {_model(self.model)}",
            f"  key     {self.key}",
        ]
        lines += [
            f"  waits   update of round {p.round} of run {p.run}, until the cloud settles it"
            for p in self.pending
        ]
        return "\n".join(lines)


def look(path: Path) -> DeviceStatus:
    """Return the status of the device in a home. NotFound if there is none."""
    home = DeviceHome(path)
    home.require_enrolled()
    enrolled, running = home.enrolled, home.is_held
    # The note outlives the process that wrote it, so it counts only while one is running.
    session = home.session if running else None
    return DeviceStatus(
        name=enrolled.name,
        cloud=home.identity.cloud,
        home=str(home.path),
        population=session.population if session else home.settings.population,
        renew_at_s=enrolled.renew_at_s,
        running=running,
        session=session,
        model=DeviceModel(home.model).choice(),
        pending=tuple(p.facts for p in Memory(home.personal, home.pending).pending()),
        key=enrolled.key,
    )


def _work(session: SessionNote | None) -> str:
    if session is None:
        return "none: no process runs here; triplane device run"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.since_s))
    if session.state == "connecting":
        return f"none yet: the cloud has not answered since {at}; the log says why"
    if session.state == "working":
        return f"for a run of the cloud, since {at}"
    if session.population_asked:
        return (
            f"none since {at}: a run asks the population {session.population!r}, and not this "
            "device now. Not every round asks every device; it works when it is asked"
        )
    if session.population_asked is False:
        return (
            f"none since {at}: no run of the cloud asks the population {session.population!r} of "
            "this device. Start one (triplane federate run --population "
            f"{session.population}), or name the population of a run (triplane device run "
            "--population)"
        )
    return (
        f"none since {at}: no run of the cloud asks this device. A run asks the population that it "
        f"was started with (federate run --population); this device's is {session.population!r}"
    )


def _model(choice: ModelChoice | None) -> str:
    if choice is None:
        return "none yet: it comes with the first task of a run"
    of = f"{choice.chosen}, of round {choice.round} of run {choice.run}"
    if not choice.samples:
        return f"{of}; not measured"
    metric = metric_named(choice.metric)
    chosen, before, after = map(metric.text_with_unit, (choice.score, choice.before, choice.after))
    what = "" if metric == ACCURACY else f"{metric.name} "
    return (
        f"{of}; {what}{chosen} of {choice.samples} held-out samples "
        f"(newest shared {before}, adapted {after})"
    )
