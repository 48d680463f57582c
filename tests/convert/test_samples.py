"""Samples from arrays and files, hostile ones too."""

import io
import zipfile

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir import TensorSpec, data
from triplane.unified_ir.convert import samples
from triplane.unified_ir.data.transforms import Scale, Select
from triplane.unified_ir.ir.graph import Value

IMAGE = (Value(TensorSpec(("N", 1, 2, 2)), "image"),)
TWO = (Value(TensorSpec(("N", 3)), "a"), Value(TensorSpec(("N",), "int64"), "b"))
X = np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_one_array_serves_the_only_input():
    assert samples.as_samples(X, IMAGE, "it")["image"] is X
    assert samples.as_samples(X.astype(np.float64), IMAGE, "it")["image"].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X[..., :1], r"image is float32\[N,1,2,2\] .* got float32\(3, 1, 2, 1\)"),
        (X[:0], "at least one sample"),
        (X.astype(np.int32), "got int32"),
        (X * np.nan, "NaN or infinity"),
        ({"other": X}, r"needs the arrays \['image'\], got \['other'\]"),
        (np.float32(1.0), "got float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, message):
    with pytest.raises(InvalidInput, match=message):
        samples.as_samples(given, IMAGE, "the calibration set")


def test_all_inputs_count_the_same_samples():
    a, b = np.zeros((4, 3), np.float32), np.zeros(4, np.int64)
    assert samples.as_samples({"a": a, "b": b}, TWO, "it").keys() == {"a", "b"}
    with pytest.raises(InvalidInput, match="b is int64"):
        samples.as_samples({"a": a, "b": b[:2]}, TWO, "it")
    with pytest.raises(InvalidInput, match="the inputs are a, b"):
        samples.as_samples(a, TWO, "it")


@pytest.mark.parametrize("y", [np.zeros(2, np.int64), np.zeros(3), np.zeros((3, 1), np.int64)])
def test_labels_are_one_whole_number_per_sample(y):
    with pytest.raises(InvalidInput, match=r"labels must be \(3,\) whole numbers"):
        samples.as_labelled((X, y), IMAGE)


def test_files_give_arrays_by_input_name_or_x(tmp_path):
    for key in ("image", "x"):
        read = samples.read_samples(write(tmp_path / "a.npz", **{key: X}, other=X), IMAGE)
        np.testing.assert_array_equal(read["image"], X)
    both = write(tmp_path / "b.npz", a=np.ones((2, 3)), b=np.arange(2))
    assert samples.read_samples(both, TWO)["b"].tolist() == [0, 1]
    x, y = samples.read_labelled(write(tmp_path / "c.npz", x=X, y=np.array([2, 0, 1])), IMAGE)
    assert (len(x["image"]), y.tolist()) == (3, [2, 0, 1])


def test_bytes_for_a_float_input_become_shares_of_one(tmp_path):
    bytes_ = np.full((1, 1, 2, 2), 255, np.uint8)
    read = samples.read_samples(write(tmp_path / "a.npz", x=bytes_), IMAGE)
    assert read["image"].tolist() == np.ones((1, 1, 2, 2)).tolist()


def test_bytes_stay_bytes_for_a_float_input_only_if_their_columns_are_not_scaled(tmp_path):
    file = write(tmp_path / "a.npz", x=np.full((1, 1, 2, 2), 255, np.uint8))
    assert samples.read_samples(file, IMAGE, x=("x",))["image"].max() == 1
    bytes_ = (Value(TensorSpec(("N", 1, 2, 2), "uint8"), "x"),)
    assert samples.read_samples(file, bytes_, pixels=False)["x"].max() == 255
    assert samples.read_samples(file, bytes_, x=("x",))["x"].max() == 255
    with pytest.raises(InvalidInput, match="got float32"):
        samples.read_samples(file, bytes_, x=("x",), pixels=True)


def test_the_shipped_digits_are_samples_by_name():
    spec = (Value(TensorSpec(("N", 1, 8, 8)), "x"),)
    assert len(samples.read_samples("digits", spec)["x"]) == 1797
    assert len(samples.read_labelled("digits", spec)[1]) == 1797
    assert len(samples.as_samples(data.digits(), spec, "it")["x"]) == 1797


def test_columns_are_chosen_by_the_options_of_load(tmp_path):
    file = write(tmp_path / "a.npz", left=np.ones((2, 3)), right=np.arange(2), y=np.arange(2))
    read = samples.read_samples(file, TWO, x=("left", "right"))
    assert read["b"].tolist() == [0, 1]
    x, y = samples.read_labelled(file, TWO, x=("left", "right"), y=("right",))
    assert (x["a"].shape, y.tolist()) == ((2, 3), [0, 1])
    with pytest.raises(NotFound, match="Other names are chosen with --x NAME"):
        samples.read_samples(file, TWO)
    with pytest.raises(InvalidInput, match=r"the model takes a, b, but .* has the inputs left;"):
        samples.read_samples(file, TWO, x=("left",))


def test_a_dataset_gives_its_inputs_by_name_else_in_order():
    a, b = np.ones((4, 3)), np.arange(4)
    for names in (("b", "a"), ("left", "right")):
        columns = dict(zip(names, (b, a) if names[0] == "b" else (a, b), strict=True))
        read = samples.as_samples(data.arrays(columns).roles(names), TWO, "it")
        assert read["b"].tolist() == [0, 1, 2, 3]
        assert read["a"].dtype == np.float32
    texts = data.arrays({"a": a, "b": np.array(["u"] * 4)}).roles(("a", "b"))
    with pytest.raises(InvalidInput, match="'b' holds text, but a model takes arrays"):
        samples.as_samples(texts, TWO, "it")
    many = data.arrays(np.zeros((1, 1, 2, 2), "f4")).repeat(1 << 28)
    with pytest.raises(InvalidInput, match="takes 4294967296 bytes in memory; at most 1073741824"):
        samples.as_samples(many, IMAGE, "it")


def test_classes_of_a_dataset_are_the_models_classes_of_the_same_names():
    # Texts are numbered by those that occur: "dog" is class 0 here, but 1 of the model.
    dataset = data.arrays(X, np.array([1, 0, 1]), labels=("dog", "owl"))
    names = ("cat", "dog", "owl")
    assert samples.as_labelled(dataset, IMAGE, names)[1].tolist() == [2, 1, 2]
    assert samples.as_labelled(dataset, IMAGE)[1].tolist() == [1, 0, 1]
    with pytest.raises(
        InvalidInput, match="has the class 'owl', but the model's classes are cat, dog"
    ):
        samples.as_labelled(dataset, IMAGE, ("cat", "dog"))


def test_characters_are_numbered_as_the_model_numbers_them(tmp_path):
    (tmp_path / "a.txt").write_text("bcbcbc")
    spec = (Value(TensorSpec(("N", "T"), "int64"), "token"),)
    read = samples.read_samples(tmp_path / "a.txt", spec, ("a", "b", "c"), window=2)
    assert read["token"].tolist() == [[1, 2], [1, 2]]
    with pytest.raises(InvalidInput, match="has the class 'c', but the model's classes are a, b"):
        samples.read_samples(tmp_path / "a.txt", spec, ("a", "b"), window=2)


def test_accuracy_is_measured_for_one_column_of_classes():
    with pytest.raises(InvalidInput, match="needs classes; `triplane evaluate BUNDLE --metric"):
        samples.as_labelled(data.arrays(X, np.ones(3, "f4")), IMAGE)
    with pytest.raises(InvalidInput, match="one column of classes, got the targets none"):
        samples.as_labelled(data.arrays(X), IMAGE)


def npz(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def header(text):
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def npy(array, *, pickled=False):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=pickled)
    return stream.getvalue()


class Trap:
    """Unpickling this would call exit."""

    def __reduce__(self):
        return (exit, (13,))


HOSTILE = {
    "objects": (
        {"x.npy": npy(np.array([Trap()], object), pickled=True)},
        InvalidInput,
        "not a plain array of numbers",
    ),
    "a shape beyond memory": (
        {"x.npy": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 40,), }")},
        InvalidInput,
        "not a plain array of numbers",
    ),
    "a size beyond the limit": (
        {"x.npy": header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**40},), }}")},
        InvalidInput,
        "at most",
    ),
    "fewer bytes than announced": ({"x.npy": npy(X)[:-1]}, Corrupt, "48 bytes announced, 47 pre"),
    "more bytes than announced": ({"x.npy": npy(X) + b"!"}, Corrupt, "more bytes than"),
    "no array": ({"x.npy": b"hello"}, Corrupt, "announced"),
    "text": ({"x.npy": npy(np.array(["a"]))}, InvalidInput, "not a plain array"),
    "an overlong header": (
        {"x.npy": header("{" + " " * 20_000 + "}")},
        InvalidInput,
        "not a plain array",
    ),
    "wrong keys": ({"y.npy": npy(X)}, NotFound, r"no array 'image'; it needs image \(or x\)"),
    "many members": ({f"{i}.npy": b"" for i in range(2000)}, InvalidInput, "lists its members"),
    "no numbers": ({"x.npy": npy(np.full_like(X, np.inf))}, InvalidInput, "NaN or infinity"),
    "a wrong shape": ({"x.npy": npy(X[..., :1])}, InvalidInput, "got float32"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case, tmp_path):
    members, family, message = HOSTILE[case]
    with pytest.raises(family, match=message):
        samples.read_samples(npz(tmp_path / "a.npz", members), IMAGE)


def test_what_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\3\4 but no more")
    with pytest.raises(Corrupt, match="not a complete npz file"):
        samples.read_samples(path, IMAGE)
    with pytest.raises(NotFound):
        samples.read_samples(tmp_path / "absent.npz", IMAGE)


def test_a_damaged_archive_never_ends_in_anything_but_a_family(tmp_path):
    good = npz(tmp_path / "good.npz", {"x.npy": npy(X)}).read_bytes()
    path = tmp_path / "bad.npz"
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 0xFF]) + good[i + 1 :])
        try:
            samples.read_samples(path, IMAGE)
        except (Corrupt, InvalidInput, NotFound):
            continue


def test_the_calibration_digest_sees_names_types_shapes_and_values():
    one = samples.digest({"x": X})
    assert one == samples.digest({"x": X.copy()})
    others: list[dict[str, np.ndarray]] = [
        {"z": X},
        {"x": X + 1},
        {"x": X.reshape(3, 4)},
        {"x": X.view(np.int32)},
    ]
    assert len({one, *map(samples.digest, others)}) == 5


IDS = (Value(TensorSpec(("N", 4), "int64"), "ids"),)


def test_characters_of_a_text_have_the_numbers_of_the_model(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("cbcbbbbbc")
    names = ("a", "b", "c", "3")  # of a model of three characters with four outputs
    read = samples.read_samples(path, IDS, names, window=4)
    assert read["ids"].tolist() == [[2, 1, 2, 1], [1, 1, 1, 1]]
    dataset = data.load(path, window=4)
    assert samples.as_samples(dataset, IDS, "it", names)["ids"].tolist() == read["ids"].tolist()
    path.write_text("abxz" * 4)
    with pytest.raises(InvalidInput, match=r"has the class 'x', but .* are a, b, c"):
        samples.read_samples(path, IDS, names, window=4)


def test_a_model_of_raw_pixels_takes_the_bytes_of_a_folder(tmp_path):
    (tmp_path / "photos" / "dark").mkdir(parents=True)
    (tmp_path / "photos" / "dark" / "1.pgm").write_bytes(b"P5 2 2 255\n" + bytes([0, 51, 102, 255]))
    raw = (Value(TensorSpec(("N", 1, 2, 2), "uint8"), "image"),)
    source = tmp_path / "photos"
    read = samples.read_samples(source, raw)["image"]
    assert (read.dtype, read.ravel().tolist()) == (np.uint8, [0, 51, 102, 255])
    assert samples.read_labelled(source, raw)[0]["image"].tolist() == read.tolist()
    with pytest.raises(InvalidInput, match="got float32"):
        samples.read_samples(source, raw, pixels=True)


@pytest.mark.parametrize(
    "choose",
    [
        lambda d: d.shuffle().batch(8),
        lambda d: d.where("y", "<", 3).take(9).weighted("y"),
        lambda d: d.split(0.3)[1].then(Select(("x", "y"))).batch(8),
        lambda d: d.batch(8),
        lambda d: d.shuffle().repeat(2).skip(3).shard(1, 2),
        lambda d: d.map(lambda s: {"x": s["x"], "y": s["y"]}).cache().shuffle(),
    ],
)
def test_raw_columns_are_of_the_samples_that_the_targets_belong_to(choose):
    pixels = np.arange(40, dtype=np.uint8).reshape(20, 2)
    source = data.arrays({"x": pixels, "y": np.arange(20) % 5}).roles("x", "y")
    dataset = choose(source.then(Scale("x", 255)))
    raw = samples.raw_columns(dataset, [Value(TensorSpec(("N", 2), "uint8"), "x")])["x"]
    plain = samples.unbatched(dataset)
    assert np.array_equal(raw, np.rint(plain.x * 255))
    assert np.array_equal(raw[:, 0] // 2 % 5, plain.y)


def test_raw_columns_of_datasets_side_by_side_are_of_the_same_epoch():
    pixels = np.arange(40, dtype=np.uint8).reshape(20, 2)
    images = data.arrays({"x": pixels}).shuffle()
    dataset = data.zipped(images, data.arrays({"y": np.arange(20)})).roles("x", "y").skip(2)
    inputs = [Value(TensorSpec(("N", 2), "uint8"), "x")]
    assert np.array_equal(samples.raw_columns(dataset, inputs)["x"], dataset.x)
    with pytest.raises(InvalidInput, match="a repeated zip of shuffled datasets"):
        samples.raw_columns(dataset.repeat(2), inputs)


def test_raw_columns_of_too_many_repeats_are_refused_before_they_are_read():
    source = data.arrays({"x": np.zeros((2, 4), np.uint8)}).roles("x").repeat(1 << 32)
    with pytest.raises(InvalidInput, match="takes 34359738368 bytes"):
        samples.raw_columns(source, [Value(TensorSpec(("N", 4), "uint8"), "x")])
