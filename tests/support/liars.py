"""Devices that lie in a study: a server to whom their contributions arrive changed."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np

from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.privacy.clipping import l2_norm
from triplane.unified_ir.federated.study.masked_sums import MaskedSum
from triplane.unified_ir.federated.study.server import MeanServer

MOST_EXAMPLES = 2**32 - 1
UNCLIPPED = 1e6
"""Norm of a change from which the device does not clip it before it is masked."""
TAKEN = 0.9
"""What `taking_the_bound_of_sums` takes of the norm bound; the others' changes need the rest."""


class LyingServer:
    """A server; `lie` maps a liar's contribution to what it sends, in these rounds."""

    def __init__(self, liars, lie, rounds=None, server=None):
        self.liars, self.lie, self.rounds = frozenset(liars), lie, rounds
        self.server = server or MeanServer()
        self.facts, self.title = self.server.facts, self.server.title
        self.follows_limits = self.server.follows_limits

    @contextlib.contextmanager
    def serving(self, study):
        with self.server.serving(study) as honest:

            def reduce(at, contributions):
                lies = self.rounds is None or len(at.rounds) + 1 in self.rounds
                return honest.reduce(
                    at,
                    [self.lie(x) if lies and x.device in self.liars else x for x in contributions],
                )

            yield SimpleNamespace(choose=honest.choose, judge=honest.judge, reduce=reduce)


def scaled(times):
    """Send that many times the change, as far as its type goes."""

    def lie(contribution):
        change = {}
        for name, x in contribution.change.items():
            most = 3e38 if x.dtype.itemsize == 4 else float(np.finfo(x.dtype).max) / 2
            change[name] = np.clip(x.astype(np.float64) * times, -most, most).astype(x.dtype)
        return replace(contribution, change=change)

    return lie


def largest(contribution):
    """Send 3e38 everywhere, with the signs of the change turned."""
    change = {
        name: np.where(x < 0, 1, -1).astype(x.dtype) * x.dtype.type(3e38)
        for name, x in contribution.change.items()
    }
    return replace(contribution, change=change)


@contextlib.contextmanager
def taking_the_bound_of_sums():
    """Let huge changes of a masked study move the mean of their sum by almost its norm bound.

    A device may add any integers, and the cloud sees their sum only. It refuses a mean that is
    longer than those of honest devices can be, which is checked here, so the lie stays below. All
    devices have to weigh the same.
    """
    integers, mean = MaskedSum.integers, MaskedSum.mean

    def lying(self, change, examples):
        levels, weight = integers(self, change, examples)
        if l2_norm(change) > UNCLIPPED:
            middle = ((1 << self.encoding.sections[0].bits) - 1) / 2
            alone = levels.astype(np.float64) - middle
            levels = np.round(middle + TAKEN * self.devices * alone).astype(np.int64)
        return levels, weight

    def checked(self, updates):
        result = mean(self, updates)
        rounding = self.encoding.sections[0].error_bound(len(updates)) / len(updates)
        assert l2_norm(result) <= self.norm + rounding, "the cloud would refuse it"
        return result

    with (
        mock.patch.object(MaskedSum, "integers", lying),
        mock.patch.object(MaskedSum, "mean", checked),
    ):
        yield


def boasting(contribution):
    """Claim as many examples as a field of 32 bits holds."""
    return replace(contribution, examples=MOST_EXAMPLES)


def honest(contribution):
    return contribution


def flipped(shard, classes=10):
    """The device with each label y as classes - 1 - y in what it learns from."""
    return Shard({**shard.train, "y": classes - 1 - shard.train["y"]}, shard.held_out)
