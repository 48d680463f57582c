"""Held-out groups, and two sources whose texts and classes are numbered alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import data
from triplane.unified_ir.data.choosing import preparation


def people(n, persons):
    who = np.array([f"person {k % persons}" for k in range(n)])
    return data.arrays(np.arange(n, dtype=np.float32), np.arange(n) % 2, who=who)


@given(n=st.integers(6, 80), persons=st.integers(2, 6), fraction=st.floats(0.1, 0.5))
def test_a_group_is_held_out_as_a_whole(n, persons, fraction):
    rest, held_out = people(n, persons).split(fraction, seed=3, group="who")
    kept, out = set(rest.column("who")), set(held_out.column("who"))
    assert not kept & out
    assert len(kept | out) == persons
    assert len(out) == int(np.ceil(round(fraction * persons, 9)))
    assert sorted([*rest.x, *held_out.x]) == list(range(n))


def test_the_seed_chooses_the_groups():
    chosen = {
        frozenset(people(40, 8).split(seed=k, group="who")[1].column("who")) for k in range(9)
    }
    assert len(chosen) > 1


def test_groups_may_be_whole_numbers_and_survive_the_json_form(tmp_path):
    np.savez(
        tmp_path / "a.npz", x=np.zeros((12, 3), "f4"), y=np.arange(12) % 2, w=np.arange(12) // 3
    )
    train, held_out = data.load_split(tmp_path / "a.npz", fraction=0.25, group="w")
    assert len(train) == 9
    assert len(np.unique(np.asarray(held_out.column("w")))) == 1
    again = data.from_json(held_out.json())
    assert (np.asarray(again.column("w")) == held_out.column("w")).all()


def test_what_cannot_be_split_by_groups_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="of the 1 groups in 'who' leaves none"):
        people(10, 1).split(group="who")
    with pytest.raises(InvalidInput, match="no column 'whom'"):
        people(10, 2).split(group="whom")
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 1), "f4"))
    with pytest.raises(NotFound, match="whom"):
        data.load_split(tmp_path / "a.npz", group="whom")
    both: Any = dict.fromkeys(("x_train", "x_test"), np.zeros((4, 1), "f4")) | dict.fromkeys(
        ("y_train", "y_test"), np.arange(4)
    )
    np.savez(tmp_path / "b.npz", **both)
    with pytest.raises((InvalidInput, NotFound)):
        data.load_split(tmp_path / "b.npz", group="y_train")


def test_both_sources_are_prepared_by_their_own_types(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((4, 1, 2, 2), 255, np.uint8), y=np.arange(4))
    np.savez(tmp_path / "b.npz", x=np.full((3, 1, 2, 2), 1, np.float32), y=np.arange(3))
    train, held_out = data.load_both(tmp_path / "a.npz", tmp_path / "b.npz")
    assert train.x.max() == held_out.x.max() == 1
    assert (len(train), len(held_out)) == (4, 3)


def test_texts_of_a_second_source_get_the_numbers_of_the_first():
    def texts(*y, of=object):
        return data.arrays(np.zeros((len(y), 2), "f4"), np.array(y, of))

    first, second = texts("cat", "dog", "owl"), texts("owl", "dog")
    prepared = preparation(first)
    other = preparation(second).numbered_as(prepared).of(second)
    assert other.y.tolist() == [2, 1]
    assert other.labels == ("cat", "dog", "owl")
    with pytest.raises(InvalidInput, match="'newt'"):
        _ = preparation(texts("newt")).numbered_as(prepared).of(texts("newt")).y
    with pytest.raises(InvalidInput, match=r"y holds texts in the first .* numbers in the second"):
        preparation(texts(0, 1, of=int)).numbered_as(prepared)
    named = data.arrays(np.zeros((2, 1), "f4"), np.arange(2), labels=("a", "b"))
    others = preparation(named.named(("b", "a")))
    with pytest.raises(InvalidInput, match="the classes of the two sources differ: a, b; b, a"):
        others.numbered_as(preparation(named))


def test_a_pipeline_takes_no_choice_of_columns(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), "f4"), y=np.arange(4))
    (tmp_path / "p.json").write_text(data.load(tmp_path / "a.npz").json())
    assert len(data.load(tmp_path / "p.json")) == 4
    with pytest.raises(InvalidInput, match="is a pipeline, which says itself"):
        data.load(tmp_path / "p.json", x=["x:2x1"])


def test_a_target_of_true_and_false_has_two_classes(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1.5,true\n2.5,false\n")
    dataset = data.load(tmp_path / "a.csv")
    assert (dataset.y.dtype, dataset.y.tolist()) == (np.int64, [1, 0])


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (["a,b"], ["a"]),
        (["a:1"], ["a:1x1"]),
        (["c=a"], ["a"]),
        (["c=a"], ["c=a"]),
        (["*"], ["a,b"]),
    ],
)
def test_a_column_is_part_of_one_input_or_target(tmp_path, x, y):
    (tmp_path / "a.csv").write_text("a,b\n1.5,2.5\n2.5,3.5\n")
    with pytest.raises(InvalidInput, match="column 'a' is chosen twice, in different forms"):
        data.load(tmp_path / "a.csv", x=x, y=y)
    both = data.load(tmp_path / "a.csv", x="a:1", y=["a:1"])  # one choice may stand alone
    assert (both.inputs, both.targets, both.x.shape) == (("a",), ("a",), (2, 1))
