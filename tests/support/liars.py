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
"""Norm of a change from which a device decides the mean of its masked sum."""


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
    """Let devices with huge changes decide the mean of their sum, as long as the norm bound.

    Nobody sees what one device adds, and it may add any integers. The cloud refuses a mean that is
    longer than those of honest devices can be, so this is the most that a liar gets who knows the
    changes of the others. The direction is that of the liars' own changes. Where the bound follows
    bits, they make all of the sum's long, which raises it.
    """
    honest = MaskedSum.mean_and_bits

    def mean_and_bits(self, updates):
        liars = [(1, change) for _, change in updates if l2_norm(change) > UNCLIPPED]
        result, bits = honest(self, liars or updates)
        longer = self.norm / l2_norm(result) if liars else 1.0
        lies = tuple(-len(updates) for _ in bits) if liars else bits
        return {name: x * longer for name, x in result.items()}, lies

    with mock.patch.object(MaskedSum, "mean_and_bits", mean_and_bits):
        yield


def boasting(contribution):
    """Claim as many examples as a field of 32 bits holds."""
    return replace(contribution, examples=MOST_EXAMPLES)


def honest(contribution):
    return contribution


def flipped(shard, classes=10):
    """The device with each label y as classes - 1 - y in what it learns from."""
    return Shard({**shard.train, "y": classes - 1 - shard.train["y"]}, shard.held_out)
