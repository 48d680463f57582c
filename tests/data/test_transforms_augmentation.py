"""Random steps: each sample against a loop over plain slices, and how often each thing happens."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import schema_of
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.transforms import (
    Erase,
    Flip,
    Jitter,
    Noise,
    RandomCrop,
    Rotate,
    Shift,
)

RNG = np.random.default_rng(3)
N = 400
IMAGES = RNG.integers(1, 256, (N, 2, 6, 7)).astype(np.uint8)
FLOATS = (IMAGES / 255).astype(np.float32)
SERIES = RNG.normal(size=(N, 3, 20))


def applied(step, x, epoch=0):
    step.schema(schema_of({"x": x}))
    before = x.copy()
    y = step.apply({"x": x}, RowDraws(11, epoch, 2, np.arange(len(x))))["x"]
    assert (x == before).all()
    assert y.dtype == x.dtype
    return y


def shifted(x, down, right, fill):
    """One image (C, H, W), moved pixel by pixel."""
    y = np.full_like(x, fill)
    for c, i, j in np.ndindex(x.shape):
        if 0 <= i + down < x.shape[1] and 0 <= j + right < x.shape[2]:
            y[c, i + down, j + right] = x[c, i, j]
    return y


def is_close_to(count, n, probability):
    """Whether a frequency is within 5 standard deviations."""
    return abs(count - n * probability) < 5 * np.sqrt(n * probability * (1 - probability)) + 1e-9


@pytest.mark.parametrize("x", [IMAGES, FLOATS, SERIES])
@pytest.mark.parametrize("axis", [-1, -2])
def test_flip_mirrors_about_half_of_the_samples(x, axis):
    y = applied(Flip("x", axis), x)
    flipped = [bool((b != a).any()) for a, b in zip(x, y, strict=True)]
    assert is_close_to(sum(flipped), N, 0.5)
    for a, b, is_flipped in zip(x, y, flipped, strict=True):
        assert (b == (np.flip(a, axis) if is_flipped else a)).all()


def test_flip_with_probability_one_or_none():
    assert (applied(Flip("x", probability=1), IMAGES) == IMAGES[..., ::-1]).all()
    assert (applied(Flip("x", probability=0), IMAGES) == IMAGES).all()


def test_flip_needs_the_axis():
    with pytest.raises(InvalidInput, match=r"no axis -3"):
        applied(Flip("x", -3), SERIES)


@pytest.mark.parametrize("x", [IMAGES, FLOATS])
def test_shift_moves_images_by_every_distance_alike(x):
    y = applied(Shift("x", 1, fill=1), x)
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    counts = dict.fromkeys(moves, 0)
    for a, b in zip(x, y, strict=True):
        (move,) = [m for m in moves if (shifted(a, *m, 1) == b).all()]
        counts[move] += 1
    assert all(is_close_to(count, N, 1 / 9) for count in counts.values())


def test_shift_moves_series_along_time():
    y = applied(Shift("x", 2), SERIES)
    seen = set()
    for a, b in zip(SERIES, y, strict=True):
        padded = np.pad(a, ((0, 0), (2, 2)))
        (move,) = [m for m in range(5) if (padded[:, m : m + 20] == b).all()]
        seen.add(move)
    assert seen == {0, 1, 2, 3, 4}


def test_random_crop_takes_every_window():
    y = applied(RandomCrop("x", (5, 7), padding=1, fill=9), IMAGES)
    assert y.shape == (N, 2, 5, 7)
    counts = np.zeros((4, 3), int)
    for a, b in zip(np.pad(IMAGES, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=9), y,
                    strict=True):  # fmt: skip
        (place,) = [p for p in np.ndindex(4, 3)
                    if (a[:, p[0] : p[0] + 5, p[1] : p[1] + 7] == b).all()]  # fmt: skip
        counts[place] += 1
    assert all(is_close_to(count, N, 1 / 12) for count in counts.ravel())


def test_a_window_must_fit():
    for step in (RandomCrop("x", (9, 7), padding=1), Erase("x", (1, 8))):
        with pytest.raises(InvalidInput, match=r"must fit into column 'x'"):
            applied(step, IMAGES)


def test_rotate_turns_around_the_centre_by_every_angle_alike():
    # Linear interpolation keeps linear functions, so the rows and columns themselves turn exactly.
    height, width = 11, 13
    rows, columns = np.mgrid[-5:6, -6:7].astype(np.float32)
    x = np.broadcast_to(np.stack([rows, columns]), (N, 2, height, width)).copy()
    y = applied(Rotate("x", 30, fill=99), x)
    inner = np.hypot(rows, columns) < 4
    places = np.stack([rows[inner], columns[inner]])
    angles = []
    for image in y:
        turn = np.linalg.lstsq(places.T, image[:, inner].T, rcond=None)[0].T
        angles.append(np.degrees(np.arctan2(turn[1, 0], turn[0, 0])))
        (a, b), (c, d) = turn
        np.testing.assert_allclose((a, b), (d, -c), atol=1e-5)
        np.testing.assert_allclose(np.linalg.det(turn), 1, atol=1e-5)
        source = np.einsum("ij,jhw->ihw", turn, x[0])
        inside = (np.abs(source) <= np.array([4.999, 5.999])[:, None, None]).all(axis=0)
        outside = (np.abs(source) >= np.array([6.001, 7.001])[:, None, None]).any(axis=0)
        np.testing.assert_allclose(source[:, inside], image[:, inside], atol=1e-4)
        assert (image[:, outside] == 99).all()
    counts, _ = np.histogram(angles, np.linspace(-30, 30, 7))
    assert counts.sum() == N
    assert all(is_close_to(count, N, 1 / 6) for count in counts)
    assert (y == 99).any()


def test_rotate_fills_what_is_outside():
    y = applied(Rotate("x", 180), np.full((N, 1, 3, 30), 200, np.uint8))
    assert (y[:, 0, 1, 14:16] == 200).all()
    assert 0.5 < (y == 0).mean() < 0.9
    assert (applied(Rotate("x", 0), IMAGES) == IMAGES).all()
    bytes_, floats = applied(Rotate("x", 90), IMAGES), applied(Rotate("x", 90), FLOATS)
    assert np.abs(bytes_ - 255.0 * floats).max() <= 0.51


def test_erase_fills_a_rectangle_inside_the_image():
    y = applied(Erase("x", (3, 7), fill=0), IMAGES)
    sizes = set()
    erased = (y == 0).any(axis=(1, 2, 3))
    assert is_close_to(erased.sum(), N, 0.5)
    for a, b in zip(IMAGES, y, strict=True):
        rows, columns = (np.flatnonzero((b[0] == 0).any(axis=k)) for k in (1, 0))
        expected = a.copy()
        if len(rows):
            sizes.add((len(rows), len(columns)))
            expected[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        assert (b == expected).all()
    assert {rows for rows, _ in sizes} == {1, 2, 3}
    assert {columns for _, columns in sizes} == set(range(1, 8))
    everywhere = (y == 0).any(axis=(0, 1))
    assert everywhere.all()


def test_noise_is_normal():
    x = np.zeros((50, 3, 33, 31), np.float32)
    z = np.sort(applied(Noise("x", 2.0, low=None, high=None), x).ravel().astype(np.float64) / 2)
    moments = [(z**k).mean() for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.05)
    # The quartiles and the 99 % quantile of the standard normal distribution.
    for quantile, value in ((0.25, -0.67449), (0.5, 0.0), (0.75, 0.67449), (0.99, 2.32635)):
        assert abs(z[int(quantile * len(z))] - value) < 0.03


def test_noise_of_neighbours_is_independent():
    x = np.zeros((64, 1, 1, 1000), np.float32)
    z = applied(Noise("x", 1.0, low=None, high=None), x)[:, 0, 0]
    halves = np.corrcoef(z[:, :500].ravel(), z[:, 500:].ravel())[0, 1]
    rows = np.corrcoef(z[:-1].ravel(), z[1:].ravel())[0, 1]
    assert max(abs(halves), abs(rows)) < 0.03


def test_noise_of_a_large_block_is_that_of_its_rows():
    x = np.full((12, 3, 120, 120), 0.5, np.float32)
    y = applied(Noise("x", 0.1), x)
    for k in range(12):
        one = RowDraws(11, 0, 2, np.array([k]))
        assert (Noise("x", 0.1).apply({"x": x[k : k + 1]}, one)["x"][0] == y[k]).all()
    assert (y[0] != y[11]).any()


def test_noise_clips_and_counts_bytes_as_parts_of_255():
    y = applied(Noise("x", 0.5, low=0.25, high=0.75), FLOATS)
    assert (y.min(), y.max()) == (0.25, 0.75)
    z = applied(Noise("x", 0.1), IMAGES)
    expected = applied(Noise("x", 25.5, high=255), IMAGES.astype(np.float32))
    assert np.abs(z - expected).max() <= 0.5
    assert (applied(Noise("x", 9.0, low=3, high=9), IMAGES) == 255).all()


def test_jitter_changes_contrast_and_brightness():
    y = applied(Jitter("x", 0.25, 0.5, low=None, high=None), FLOATS)
    gains, offsets = [], []
    for a, b in zip(FLOATS.astype(np.float64), y, strict=True):
        gain, rest = np.polyfit(a.ravel() - a.mean(), b.ravel(), 1)
        gains.append(gain)
        offsets.append(rest - a.mean())
        np.testing.assert_allclose(a.mean() + gain * (a - a.mean()) + offsets[-1], b, atol=1e-5)
    for values, middle, reach in ((gains, 1, 0.5), (offsets, 0, 0.25)):
        assert abs(np.mean(values) - middle) < reach / 6
        assert middle - reach < min(values) < middle - 0.9 * reach
        assert middle + 0.9 * reach < max(values) < middle + reach


def test_jitter_of_bytes_agrees_with_that_of_floats():
    y = applied(Jitter("x", 0.3, 0.9), IMAGES)
    z = applied(Jitter("x", 0.3, 0.9), FLOATS)
    assert np.abs(y - 255.0 * z).max() <= 0.51
    assert y.min() == 0
    assert y.max() == 255


def test_jitter_and_noise_of_nothing():
    assert (applied(Jitter("x"), FLOATS) == FLOATS).all()
    assert (applied(Noise("x", 0), IMAGES) == IMAGES).all()


@pytest.mark.parametrize("step", [Noise("x", 1.0), Jitter("x")])
def test_noise_and_jitter_refuse_other_types(step):
    with pytest.raises(InvalidInput, match="must hold uint8 or float32, got float64"):
        applied(step, SERIES)


@pytest.mark.parametrize(
    "step", [Flip("x"), Shift("x", 2), Rotate("x", 5), RandomCrop("x", (4, 4)), Erase("x", (4, 4)),
             Noise("x", 0.1), Jitter("x", 0.1)],
)  # fmt: skip
def test_another_epoch_changes_samples_in_another_way(step):
    first, second = applied(step, IMAGES), applied(step, IMAGES, epoch=1)
    assert (first != second).any()
    assert (first == applied(step, IMAGES)).all()
