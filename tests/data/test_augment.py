import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data
from triplane.unified_ir.data.augment import augmented, flipped, noisy, shifted

DIGITS = data.digits().take(40)


def test_copies_follow_the_originals_with_their_labels():
    made = augmented(DIGITS, shifted(1), copies=2)
    assert len(made) == 120
    np.testing.assert_array_equal(made.x[:40], DIGITS.x)
    np.testing.assert_array_equal(made.y, np.tile(DIGITS.y, 3))
    assert (made.x[40:80] != made.x[80:]).any()


def test_the_same_seed_gives_the_same_copies():
    a, b, c = (augmented(DIGITS, shifted(1), noisy(0.1), seed=s).x for s in (1, 1, 2))
    assert a.tobytes() == b.tobytes() != c.tobytes()


def test_a_mirror_changes_about_half():
    x = flipped(DIGITS.x, np.random.default_rng(0))
    same = [(a == b).all() for a, b in zip(x, DIGITS.x, strict=True)]
    turned = [(a == b[..., ::-1]).all() for a, b in zip(x, DIGITS.x, strict=True)]
    assert all(s or t for s, t in zip(same, turned, strict=True))
    assert 8 < sum(same) < 32


def test_a_shift_moves_whole_images_and_fills_the_rest():
    x = np.zeros((200, 2, 5, 5), np.float32)
    x[:, :, 2, 2] = 1.0
    made = shifted(2, fill=0.25)(x, np.random.default_rng(0))
    places = np.argwhere(made == 1.0)
    assert len(places) == 400
    assert {tuple(p[2:]) for p in places} == {(i, j) for i in range(5) for j in range(5)}
    assert (made == 0.25).any()


def test_noise_stays_within_the_range():
    x = noisy(0.5)(DIGITS.x, np.random.default_rng(0))
    assert x.dtype == np.float32
    assert 0.0 <= x.min() <= x.max() <= 1.0


def cut(x, _):
    return x[:, :, 1:]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: augmented(DIGITS, copies=0), "at least 1 copy, got 0"),
        (lambda: augmented(DIGITS, cut), r"must return float32\[40, 1, 8, 8\] .* got float32"),
        (lambda: shifted(-1), "got -1"),
        (lambda: noisy(-0.1), "got -0.1"),
    ],
)
def test_wrong_calls_are_told_the_rule(call, words):
    with pytest.raises(InvalidInput, match=words):
        call()
