import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import arrays


def numbered(n, classes=3):
    """Image k is one pixel of value k, so a batch shows which images it holds."""
    x = np.arange(n, dtype=np.float32).reshape(n, 1, 1, 1)
    return arrays(x, np.arange(n) % classes)


def ids(batches):
    return [x.ravel().astype(int).tolist() for x, _ in batches]


@given(n=st.integers(1, 60), size=st.integers(1, 70), seed=st.integers(0, 2**64 - 1))
def test_an_epoch_shows_every_image_once(n, size, seed):
    shown = ids(numbered(n, classes=1).batches(size, seed=seed))
    assert sorted(itertools.chain(*shown)) == list(range(n))
    assert all(len(batch) == size for batch in shown[:-1])


def test_order_depends_on_seed_and_epoch_alone():
    first = ids(numbered(20).batches(6, seed=1, epoch=2))
    assert first == ids(numbered(20).batches(6, seed=1, epoch=2))
    assert first != ids(numbered(20).batches(6, seed=1, epoch=3))
    assert first != ids(numbered(20).batches(6, seed=2, epoch=2))


def test_order_is_the_same_on_every_version_of_numpy():
    (order,) = ids(numbered(1000).batches(1000, seed=7, epoch=3))
    digest = hashlib.sha256(np.array(order, "<i8").tobytes()).hexdigest()
    assert digest == "5dd4a4a3c0ab66a3fa381d4e13d0177cea3ecf0a2b878010627bba3ea72405a4"


def test_labels_stay_with_their_images():
    for x, y in numbered(50, classes=7).batches(8, seed=0):
        assert (x.ravel() % 7 == y).all()


def test_drop_last_leaves_out_the_short_batch():
    assert [len(b) for b in ids(numbered(20).batches(6, seed=0, drop_last=True))] == [6, 6, 6]
    assert [len(b) for b in ids(numbered(20).batches(6, seed=0))] == [6, 6, 6, 2]


@given(n=st.integers(5, 200), fraction=st.floats(0.05, 0.8), classes=st.integers(1, 5))
def test_split_parts_are_disjoint_whole_and_stratified(n, fraction, classes):
    whole = numbered(n, classes)
    rest, held_out = whole.split(fraction, seed=4)
    both = np.concatenate([rest.x.ravel(), held_out.x.ravel()])
    assert sorted(both) == list(range(n))
    assert len(held_out) == int(np.ceil(round(fraction * n, 9)))
    for k in range(classes):
        share = (whole.y == k).sum() * len(held_out) / n
        assert abs((held_out.y == k).sum() - share) < 1


def test_split_repeats_and_follows_its_seed():
    parts = [numbered(60).split(0.25, seed=s)[1].x.ravel().tolist() for s in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.999])
def test_split_refuses_to_leave_a_part_empty(fraction):
    with pytest.raises(InvalidInput):
        numbered(10).split(fraction)


def test_take_gives_the_first_images_and_never_fewer():
    assert numbered(10).take(3).x.ravel().tolist() == [0, 1, 2]
    with pytest.raises(InvalidInput, match=r"1\.\.10"):
        numbered(10).take(11)


def test_data_is_read_only_and_the_callers_array_stays_writable():
    x = np.zeros((2, 1, 1, 1), np.float32)
    dataset = arrays(x, np.zeros(2, np.int64), labels=("zero",))
    with pytest.raises(ValueError, match="read-only"):
        dataset.x[0] = 1
    x[0] = 1


def test_arrays_are_taken_as_they_are():
    x = np.array([[0, 51], [255, 3]], np.uint8)
    dataset = arrays(x, np.array([0.5, 1.5]), weight=np.array([1, 2], np.int8))
    assert dataset.x.dtype == np.uint8
    assert dataset.x.shape == (2, 2)
    assert dataset.y.tolist() == [0.5, 1.5]
    assert list(dataset.schema) == ["x", "y", "weight"]


REFUSED = {
    "no samples": (np.zeros((0, 2, 2), np.uint8), np.zeros(0, int)),
    "too few labels": (np.zeros((3, 2, 2), np.uint8), np.zeros(2, int)),
    "one number": (np.float32(1), np.zeros(1, int)),
    "not a number": (np.full((1, 2, 2), np.nan), np.zeros(1, int)),
    "objects": (np.array([object()]), np.zeros(1, int)),
    "complex": (np.zeros((1, 2), np.complex64), np.zeros(1, int)),
    "dates": (np.zeros(1, "datetime64[s]"), np.zeros(1, int)),
}


@pytest.mark.parametrize(("x", "y"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_dataset_is_refused(x, y):
    with pytest.raises(InvalidInput):
        arrays(x, y)


def test_every_class_has_a_name():
    with pytest.raises(InvalidInput, match="class 2 of sample 1 has no name; there are 2 labels"):
        arrays(np.zeros((2, 2), np.uint8), np.array([0, 2]), labels=("a", "b"))
    with pytest.raises(InvalidInput, match="labels must be whole numbers, one per sample"):
        arrays(np.zeros((2, 2), np.uint8), np.array([0.0, 1.0]), labels=("a", "b"))


@pytest.mark.parametrize(
    "options", [{"size": 0, "seed": 0}, {"size": 1, "seed": -1}, {"size": 1, "seed": 2**64}]
)
def test_batches_refuses_nonsense(options):
    with pytest.raises(InvalidInput):
        next(numbered(3).batches(**options))


def test_a_pixel_that_is_no_number_is_named_by_its_place():
    x = np.zeros((5, 1, 2, 2), np.float32)
    x[3, 0, 1, 0] = np.nan
    with pytest.raises(InvalidInput, match=r"first in sample 3: x\[3, 0, 1, 0\] is nan"):
        arrays(x, np.zeros(5, int))
