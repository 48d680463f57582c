"""What `triplane device status` shows: who the device is, its model, and what waits to be sent."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from triplane.device.home import DeviceHome
from triplane.device.memory import Facts, Memory
from triplane.device.model import Choice, Model


@dataclass(frozen=True, slots=True)
class Status:
    """A device at rest or at work. renew_at_s: seconds since 1970."""

    name: str
    cloud: str
    home: str
    population: str
    renew_at_s: float
    running: bool
    model: Choice | None
    pending: tuple[Facts, ...]

    def record(self) -> Mapping[str, object]:
        """For scripts."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.name}  population {self.population}, cloud {self.cloud}",
            f"  home    {self.home}  ({'running' if self.running else 'not running'})",
            f"  model   {_model(self.model)}",
        ]
        lines += [
            f"  waits   update of round {p.round} of run {p.run}, until the cloud settles it"
            for p in self.pending
        ]
        return "\n".join(lines)


def look(path: Path) -> Status:
    """The status of the device in that home. NotFound where there is none."""
    home = DeviceHome(path)
    home.require_enrolled()
    enrolled = home.enrolled
    return Status(
        name=enrolled.name,
        cloud=home.identity.cloud,
        home=str(home.path),
        population=home.settings.population,
        renew_at_s=enrolled.renew_at_s,
        running=home.is_held,
        model=Model(home.model).choice(),
        pending=tuple(p.facts for p in Memory(home.personal, home.pending).pending()),
    )


def _model(choice: Choice | None) -> str:
    if choice is None:
        return "none yet: it comes with the first task of a run"
    of = f"{choice.chosen}, of round {choice.round} of run {choice.run}"
    if not choice.samples:
        return f"{of}; not measured"
    return (
        f"{of}; {choice.accuracy:.1%} of {choice.samples} held-out samples "
        f"(newest shared {choice.before:.1%}, adapted {choice.after:.1%})"
    )
