"""Gradient inversion: what updates of a network with a dense first layer tell about samples.

For z = W x + b, a sum of gradients over samples has dW_j = sum_i g_ij x_i and db_j = sum_i g_ij.
Where a ReLU passes only one sample of the sum, dW_j / db_j is that sample (Phong et al. 2017,
eprint.iacr.org/2017/715, section 3; Boenisch et al. 2021, arXiv 2112.02918). A cloud that chooses
the state makes such units: with equal rows of W and rising thresholds, neighbouring units differ by
the samples between two thresholds (Fowl et al. 2022, arXiv 2110.13057).

The attacker has one guess for each unit, and the nearest guess to a sample counts, which no real
attacker knows. That is in the attacker's favour.
"""

from dataclasses import dataclass

import numpy as np
from tests.federated.masking.rounds import Round, terms

from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.federated.algorithms import Hyper, plan_of
from triplane.unified_ir.federated.core.learn import Shard, Work, learn
from triplane.unified_ir.federated.masking import EncodedSection, UpdateEncoding, range_for
from triplane.unified_ir.federated.masking.integers import IntegerSum
from triplane.unified_ir.federated.privacy import clipping
from triplane.unified_ir.federated.privacy.accountant import CONCENTRATED
from triplane.unified_ir.federated.privacy.budget import run_budget
from triplane.unified_ir.federated.privacy.central import central_noise
from triplane.unified_ir.federated.privacy.distributed import distributed_noise, rounded_norm
from triplane.unified_ir.runtime import Plan

PIXELS, UNITS, BATCH, DELTA = 64, 256, 8, 1e-5
WEIGHT, BIAS, NEXT = "1.weight", "1.bias", "3.weight"
NORM = 0.15
"""Updates are clipped to it; honest ones have 0.08 to 0.20."""
HONEST = 8
"""Devices of a cohort of ten on whose noise the distributed noise counts."""


@dataclass(frozen=True)
class View:
    """The change of a shared state that somebody sees, and the samples that are in it."""

    change: dict
    samples: np.ndarray


class DigitsAtDevices:
    """Digits on devices with eight samples each, and the plan with which they learn."""

    def __init__(self, folder):
        nn.seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Dense(PIXELS, UNITS), nn.ReLU(), nn.Dense(UNITS, 10))
        trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
        trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
        self.start = plan_of(
            trainer.export(), "fedavg", Hyper(lr=0.1), folder / "digits.plan"
        ).state
        self.plan = Plan.load(folder / "digits.plan")
        digits = data.digits()
        # The first device has digits of eight kinds.
        order = np.random.default_rng(124).permutation(len(digits.y))
        self.x, self.y = digits.x[order], digits.y[order]
        self.images = self.x.reshape(-1, PIXELS).astype(np.float64)

    def learned(self, first, count=BATCH, *, steps=1, state=None):
        """Return what a device with these digits sends, unprotected."""
        rows = slice(first, first + count)
        self.plan.assign({**self.start, **(state or {})})
        work = Work(
            run="0123456789abcdef", round=1, device="ann", seed=7,
            steps=steps, batch_size=min(count, 32), support=0, query=0,
        )  # fmt: skip
        change = learn(self.plan, work, Shard({"x": self.x[rows], "y": self.y[rows]}, {})).change
        return View(change, self.images[rows])

    def updates(self, devices, *, state=None):
        """Return the updates of so many devices, clipped to the norm of the run."""
        views = [self.learned(BATCH * k, state=state) for k in range(devices)]
        for view in views:
            clipping.clip(view.change, NORM)
        return views

    def chosen_state(self):
        """Return a state of the cloud's choice, by digits that nobody in a run has."""
        brightness = self.images[1000:].sum(axis=1)
        thresholds = np.quantile(brightness, np.linspace(0, 1, UNITS, endpoint=False))
        # Small, so that float32 rounds little of a change away, and later layers change little.
        scale = np.float32(1e-6)
        return {
            WEIGHT: np.full((UNITS, PIXELS), scale),
            BIAS: (-thresholds * scale).astype(np.float32),
            NEXT: np.repeat(self.start[NEXT][:, :1], UNITS, axis=1),
        }

    def errors(self, guesses, samples):
        """Return the RMS error of the nearest guess, relative to that of the mean image: (n,)."""
        mean = self.images.mean(axis=0, keepdims=True)
        return _distances(guesses, samples).min(axis=0) / _distances(mean, samples)[0]


def guesses(change):
    """Return dW_j / db_j for each unit, as images: (UNITS, PIXELS)."""
    return _ratios(change[WEIGHT], change[BIAS])


def guesses_between(change):
    """Return what neighbouring units of the chosen state differ by."""
    rows = [np.append(change[name], 0 * change[name][:1], axis=0) for name in (WEIGHT, BIAS)]
    return _ratios(*(np.diff(x.astype(np.float64), axis=0) for x in rows))


def summed(views):
    """Return the sum of updates as it is."""
    change = {n: sum(v.change[n].astype(np.float64) for v in views) for n in views[0].change}
    return View(change, _samples(views))


def masked_input(views):
    """Return what the first device of a masked round sends, read as if it were a sum of one."""
    encoding = _encoding(views)
    fields = encoding.fields
    masked = Round(len(views), terms(fields=[(f.entries, f.bits, f.noise_bits) for f in fields]))
    masked.advertise()
    deliveries = masked.share(range(len(views)))
    sent = masked.devices[0].mask(deliveries[0], _encoded(encoding, views[0]))
    integers = IntegerSum(fields, len(views))
    integers.add_encoded(sent.data)
    vector, _ = integers.values()
    # The cloud knows the weight, because a device says how many samples it has.
    (mean,), _ = encoding.decode([vector, np.ones(1, np.uint64)], 1, cohort=len(views))
    return View(_unflattened(mean, views[0].change), views[0].samples)


def masked_sum(views):
    """Return the sum that a masked round of these devices reveals, at 8 bits."""
    encoding = _encoding(views)
    sums = _added([_encoded(encoding, view) for view in views], encoding.fields, len(views))
    return _decoded(encoding, sums, views)


def with_central_noise(views, epsilon):
    """Return the change of the state that the cloud publishes after one round with noise."""
    multiplier = run_budget(epsilon, DELTA, 1).noise_multiplier
    flat = [_flattened(view.change) for view in views]
    noise = central_noise(multiplier, norm=NORM, entries=flat[0].size)
    total = noise.add(np.add.reduce([noise.round(x) for x in flat]), noise.draw([]))
    return View(_unflattened(total, views[0].change), _samples(views))


def with_noise_of_devices(views, epsilon):
    """Return the sum that a masked round reveals if each device adds its part of the noise."""
    multiplier = run_budget(epsilon, DELTA, 1, law=CONCENTRATED).noise_multiplier
    (plain,) = _encoding(views).sections
    steps = rounded_norm(NORM / plain.step, plain.padded, beta=0)
    noise = distributed_noise(multiplier, norm=steps, entries=plain.padded, honest=HONEST)
    bits = noise.sum_bits(len(views), 255) - plain.field.width(len(views))
    encoding = _encoding(views, noise_bits=max(0, bits))
    vectors = []
    for view in views:
        levels, weight = _encoded(encoding, view)
        vectors.append([(levels.astype(np.int64) + noise.draw()).view(np.uint64), weight])
    return _decoded(encoding, _added(vectors, encoding.fields, len(views)), views)


def _encoding(views, noise_bits=0):
    entries = _flattened(views[0].change).size
    section = EncodedSection(entries, range=range_for(NORM, entries), noise_bits=noise_bits)
    return UpdateEncoding((section,), cap=1, seed=1)


def _encoded(encoding, view):
    return encoding.encode([_flattened(view.change)], 1)


def _added(vectors, fields, devices):
    """Add modulo 2^width, as a masked sum does."""
    return [
        np.add.reduce([np.asarray(v, np.uint64) for v in column])
        & np.uint64((1 << field.width(devices)) - 1)
        for field, column in zip(fields, zip(*vectors, strict=True), strict=True)
    ]


def _decoded(encoding, sums, views):
    (mean,), _ = encoding.decode(sums, len(views), cohort=len(views))
    return View(_unflattened(mean, views[0].change), _samples(views))


def _samples(views):
    return np.concatenate([view.samples for view in views])


def _flattened(change):
    return np.concatenate([change[name].reshape(-1) for name in sorted(change)])


def _unflattened(vector, like):
    ends = np.cumsum([like[name].size for name in sorted(like)])
    parts = zip(sorted(like), np.split(vector, ends[:-1]), strict=True)
    return {name: part.reshape(like[name].shape) for name, part in parts}


def _ratios(weight, bias):
    with np.errstate(divide="ignore", invalid="ignore"):
        images = np.asarray(weight, np.float64) / np.asarray(bias, np.float64)[:, None]
    # A unit that no sample passes says nothing: 0 / 0.
    return np.clip(np.nan_to_num(images, nan=0.0, posinf=1.0, neginf=0.0), 0, 1)


def _distances(x, y):
    """Return the RMS errors between rows: (len(x), len(y))."""
    squares = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * x @ y.T
    return np.sqrt(np.maximum(squares, 0) / PIXELS)
