"""How many steps the device runs in one launch: as many as asked for, or as measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final, Literal

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.engines import LaunchBatches
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train.batches import Batch, is_count
from triplane.unified_ir.train.callbacks import Callback

AUTO: Final = "auto"
AUTO_STEPS: Final = 32
"""Steps of a launch with "auto", which leaves at most a thirtieth of what a launch costs."""
AUTO_BYTES: Final = 64 << 20
"""Limit for the batches of such a launch."""
MEASURED: Final = 3
"""Launches, and runs of as many single steps, that are compared; one that compiles is left out."""

StepsPerLaunch = int | Literal["auto"]


def checked_steps(steps: StepsPerLaunch) -> StepsPerLaunch:
    """Return a value of `steps_per_launch`; InvalidInput if it is none."""
    if steps != AUTO and not is_count(steps, 1):
        raise InvalidInput(f'steps_per_launch is a number >= 1 or "auto", got {steps!r}')
    return steps


class LaunchChoice(Callback):
    """What "auto" has measured; checkpoints hold it, so that a resumed run goes on alike.

    together: whether several steps in one launch took less time; None before it is known.
    """

    def __init__(self) -> None:
        self.together: bool | None = None

    def state_dict(self) -> Mapping[str, Array]:
        """See `Callback`."""
        return {} if self.together is None else {"together": np.array(self.together)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """See `Callback`."""
        kept = state.get("together")
        if kept is not None and (kept.shape, kept.dtype) != ((), np.dtype(bool)):
            raise Corrupt(f"the checkpoint's choice of launches is {kept.dtype}{kept.shape}")
        self.together = None if kept is None else bool(kept)


class Launching:
    """Decides about each launch of a run. say: called with a line on what was measured."""

    def __init__(
        self, steps: StepsPerLaunch, choice: LaunchChoice, say: Callable[[str], None]
    ) -> None:
        self._steps, self._choice, self._say = steps, choice, say
        # Seconds of a step, together and one by one, for each shape of batches.
        self._times: defaultdict[Any, tuple[list[float], list[float]]]
        self._times = defaultdict(lambda: ([], []))
        self._compiled: set[Any] = set()

    @property
    def is_single(self) -> bool:
        """Whether each step is a launch of its own."""
        return self._steps == 1 or (self._steps == AUTO and self._choice.together is False)

    def room(self, batch: Batch) -> int:
        """Return how many batches like this one a launch has at most."""
        if self._steps == AUTO:
            return max(1, min(AUTO_STEPS, AUTO_BYTES // max(1, sum(a.nbytes for a in batch))))
        return int(self._steps)

    def together(self, batches: LaunchBatches) -> bool:
        """Return whether these steps run in one launch: in turns until that is decided."""
        if len(batches) == 1 or self.is_single:
            return False
        if self._steps != AUTO or self._choice.together:
            return True
        launched, single = self._times[_kinds(batches)]
        return len(launched) <= len(single)

    def measure(self, batches: LaunchBatches, seconds: float, *, together: bool) -> None:
        """Take the time of the steps of a launch, and decide once there are enough."""
        if len(batches) == 1 or self._steps != AUTO or self._choice.together is not None:
            return
        kinds = _kinds(batches)
        program = kinds, together and len(batches)
        if program not in self._compiled:  # this time it was
            self._compiled.add(program)
            return
        launched, single = self._times[kinds]
        (launched if together else single).append(seconds / len(batches))
        if len(single) >= MEASURED:
            self._decide(median(launched) / median(single))

    def _decide(self, ratio: float) -> None:
        self._choice.together = ratio <= 1
        goes_on = "a launch for each step" if ratio > 1 else "launches of several steps"
        self._say(
            f"several steps in one launch take {ratio:.2f} of the time of as many launches; the "
            f"run goes on with {goes_on}"
        )


def _kinds(batches: LaunchBatches) -> Any:
    return tuple([(a.dtype, a.shape) for a in batches.batch(0).values()])


class SingleBatch:
    """One batch as a launch of its own, which is not copied; see `LaunchBatches`."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Array]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: Mapping[str, Array]) -> None:
        """See `LaunchBatches.add`."""
        self._batches.append(dict(batch))

    def finish(self) -> None:
        """Leave the batch where it is."""

    def batch(self, i: int) -> dict[str, Array]:
        """See `LaunchBatches.batch`."""
        return self._batches[i]
