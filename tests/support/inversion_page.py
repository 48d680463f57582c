"""The table and the picture of what gradient inversion reads of digits, for docs/evidence/."""

import datetime as dt
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from tests.support import inversion
from tests.support.inversion import BATCH, HONEST, NORM, View, guesses, guesses_between

from triplane.unified_ir.files.chart import FONT, INK

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
PIXEL, GAP, LEFT, RIGHT, TOP = 7, 10, 320, 110, 46
LEVELS = 8


@dataclass(frozen=True)
class NamedView:
    """A row of the table.

    protected: it must be no nearer than the mean image. drawn: it is in the picture.
    """

    name: str
    view: View
    by: Callable = guesses
    protected: bool = False
    drawn: bool = False

    def errors(self, digits):
        return digits.errors(self.by(self.view.change), self.view.samples)


def views(digits):
    """Return all rows, in the order of the page."""
    return [*_unprotected(digits), *_masked(digits), *_chosen(digits), *_noised(digits)]


def write(digits, rows):
    """Write inversion.md and inversion.svg."""
    lines = [_line(row, digits) for row in rows]
    (EVIDENCE / "inversion.md").write_text("\n".join([_head(), *lines]) + "\n" + _end())
    (EVIDENCE / "inversion.svg").write_text(_picture(digits, [r for r in rows if r.drawn]))


def _unprotected(digits):
    for count in (1, 4, 8, 32):
        view = digits.learned(0, count)
        yield NamedView(f"one update, a step on {count}", view, drawn=count == BATCH)
    yield NamedView("one update, 5 steps on its 8", digits.learned(0, steps=5), drawn=True)
    yield NamedView("one update, 20 steps on its 8", digits.learned(0, steps=20))
    yield NamedView("one update, 5 steps on 32 of 100", digits.learned(0, 100, steps=5))


def _masked(digits):
    updates = digits.updates(30)
    yield NamedView(
        "masked input of 1 of 3", inversion.masked_input(updates[:3]), protected=True, drawn=True
    )
    for n in (3, 10, 30):
        yield NamedView(f"sum of {n}, exact", inversion.summed(updates[:n]))
        yield NamedView(f"sum of {n}, 8 bits", inversion.masked_sum(updates[:n]), drawn=True)


def _chosen(digits):
    updates = digits.updates(30, state=digits.chosen_state())
    for n in (3, 10, 30):
        total, rounded = inversion.summed(updates[:n]), inversion.masked_sum(updates[:n])
        yield NamedView(f"chosen state: sum of {n}, exact", total, guesses_between, drawn=n == 10)
        yield NamedView(f"chosen state: sum of {n}, 8 bits", rounded, guesses_between)


def _noised(digits):
    updates = digits.updates(10)
    for name, noised in (
        ("central noise", inversion.with_central_noise),
        ("noise of devices", inversion.with_noise_of_devices),
    ):
        for epsilon in (1, 8, 50, 1_000, 100_000):
            yield NamedView(
                f"{name}, sum of 10, epsilon {epsilon:,}", noised(updates, epsilon),
                protected=epsilon <= 8, drawn=epsilon in {8, 100_000},
            )  # fmt: skip
    chosen = digits.updates(10, state=digits.chosen_state())
    for epsilon in (8, 50):
        view = inversion.with_noise_of_devices(chosen, epsilon)
        yield NamedView(
            f"chosen state: noise of devices, sum of 10, epsilon {epsilon}", view, guesses_between,
            protected=True,
        )  # fmt: skip


def _line(row, digits):
    errors, samples = row.errors(digits), row.view.samples
    others = digits.images[1000 : 1000 + len(samples)]
    control = digits.errors(row.by(row.view.change), others)
    mean = digits.images.mean(axis=0)
    squares = (errors**2) * np.mean((mean - samples) ** 2, axis=1)
    psnr = -10 * np.log10(np.median(squares) + 1e-30)
    cells = [
        row.name, len(errors), f"{np.median(errors):.3f}", f"{errors.min():.3f}",
        int(np.sum(errors < 0.01)), f"{psnr:.1f}", f"{np.median(control):.3f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _head():
    day = dt.datetime.now(dt.UTC).date()
    return f"""# Gradient inversion

`make deep SUITE=inversion`, {day}, {platform.machine()}, {os.cpu_count()} cores, Python \
{platform.python_version()}; seconds.
Noise comes from the operating system, so its rows differ each time.

Devices with {BATCH} of the 1,797 digits (8 by 8 pixels) each take a step of `fedavg` with a real
plan, on a network of two dense layers, {inversion.UNITS} units and a ReLU. The attacker has one
guess for each unit: the change of its weights divided by that of its bias (Phong et al. 2017;
Boenisch et al. 2021, arXiv 2112.02918).

![Digits, and what is reconstructed from what somebody sees](inversion.svg)

The *error* of a digit is the RMS error of the guess that is nearest to it, relative to that of the
mean of all digits; above 1, the mean image is the better guess. *Recovered* are digits with an
error below 0.01. *Others* is the median error for as many digits that no device had: what a guess
tells about those is not about a device. Choosing the nearest guess favours the attacker, who does
not know which one that is.

Sums are of updates clipped to a norm of {NORM}. An *exact* sum has no rounding; one of *8 bits* is
what a masked round reveals. Epsilon is that of one round, at delta 1e-5; noise of devices counts on
{HONEST} honest ones of 10. A *chosen state* is one that a cloud makes up for the attack (Fowl et
al. 2022, arXiv 2110.13057).

| what is seen | digits in it | median error | least error | recovered | PSNR, dB | others |
|---|---|---|---|---|---|---|"""


def _end():
    return """
* Several steps on the same samples protect no more than one: a unit that only one digit passes
  stays one.
* A sum without noise hides whose digit it is, and not the digit. With more samples, fewer units are
  passed by one alone, and 8 bits blur what is left; but the sum of ten devices still has
  recognizable digits. The guesses from 30 are about as near to digits that nobody had: they are
  averages, and here and there a single digit.
* From a state that the cloud chose, half of the digits in an exact sum of ten devices are
  recovered.
* With noise for epsilon 8, and even 50, guesses are no nearer than the mean image, and as far from
  digits that nobody had, whatever the state was. At 100,000, which promises nothing, digits show
  again.
* This is one attack, without knowledge of digits and without optimization. Others reach further:
  batches of up to 25 exactly (Dimitrov et al. 2024, arXiv 2403.03945), images from convolutional
  networks (Geiping et al. 2020, arXiv 2003.14053). That one attack fails proves nothing; epsilon
  bounds all of them.
"""


def _picture(digits, rows):
    """Draw the digits of the first device, and the nearest guess to each in each row."""
    originals = digits.images[:BATCH]
    mean = digits.images.mean(axis=0)
    lines = [("the digits of a device", originals, "")]
    for row in rows:
        images = row.by(row.view.change)
        nearest = np.square(images[:, None] - originals).sum(axis=-1).argmin(axis=0)
        errors = digits.errors(images, originals)
        shown = f"{np.median(errors):.2f}"
        lines.append((row.name, images[nearest], shown))
    lines.append(("the mean of all digits", np.repeat(mean[None], BATCH, axis=0), "1.00"))
    step = 8 * PIXEL + GAP
    width, height = LEFT + BATCH * step + RIGHT, TOP + len(lines) * step + 8
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    title = "What gradient inversion reconstructs of the digits of one device"
    body = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT} font-size='13'>",
        f"<title>{title}</title>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(12, 26, title, "font-size='16' font-weight='600'"),
        _text(LEFT + BATCH * step + 8, 26, "median error"),
    ]
    for i, (name, images, error) in enumerate(lines):
        y = TOP + i * step
        body.append(_text(12, y + 4 * PIXEL + 4, name))
        body += [_image(image, LEFT + k * step, y) for k, image in enumerate(images)]
        body.append(_text(LEFT + BATCH * step + 8, y + 4 * PIXEL + 4, error))
    return "\n".join([*body, "</svg>"]) + "\n"


def _image(image, x, y):
    """Draw 8 by 8 pixels: one path for each shade of grey."""
    shades = np.rint(image.reshape(8, 8) * LEVELS).astype(int)
    paths = [f"<rect width='8' height='8' fill='{_grey(0)}'/>"]
    for level in range(1, LEVELS + 1):
        places = [f"M{c} {r}h1v1h-1z" for r, c in np.argwhere(shades == level)]
        if places:
            paths.append(f"<path d='{''.join(places)}' fill='{_grey(level)}'/>")
    scale = f"translate({x} {y}) scale({PIXEL})"
    return f"<g transform='{scale}' shape-rendering='crispEdges'>{''.join(paths)}</g>"


def _grey(level):
    return "#" + f"{255 - round(level * 255 / LEVELS):02x}" * 3


def _text(x, y, text, style=""):
    return f"<text x='{x}' y='{y}' fill='{INK}' {style}>{escape(text)}</text>"
