"""From a file and options to devices that take part and devices that are only scored."""

import csv
import json

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.federated.study.source import SampleSource, devices_of

N = 240


def classifier(size=2, classes=3, entries=("predict", "evaluate", "loss")):
    trainer = train.Trainer(
        nn.Sequential(nn.Flatten(), nn.Dense(size * size, classes)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((1, 1, size, size), np.float32), np.zeros(1, np.int64))
    return trainer.export(entries)


@pytest.fixture(scope="module")
def module():
    return classifier()


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    writer = np.arange(N, dtype=np.int32) % 6
    np.savez(
        tmp_path / "a.npz",
        images=rng.integers(0, 255, (N, 2, 2)).astype(np.uint8),
        labels=(np.arange(N) % 3).astype(np.uint8),
        writer=writer,
        split=(writer >= 4).astype(np.uint8),
        share=np.linspace(0, 1, N),
        one=np.full(N, 2),
        signed=np.arange(N) % 3 - 1,
    )
    return tmp_path / "a.npz"


def source(path, **options):
    return SampleSource(data=str(path), x=("images",), y=("labels",), **options)


def test_groups_and_their_split(path, module):
    seen, unseen = devices_of(source(path, way="group", group="writer", split="split"), module)
    assert list(seen) == ["device-0", "device-1", "device-2", "device-3"]
    assert list(unseen) == ["device-4", "device-5"]
    (shard, *_) = seen.values()
    assert shard.examples + shard.held_out_samples == N // 6
    assert list(shard.train) == [value.name for value in module.inputs("loss")]
    x, y = shard.train.values()
    assert (str(x.dtype), x.shape[1:], str(y.dtype)) == ("float32", (1, 2, 2), "int64")
    assert 0 <= x.min() <= x.max() <= 1


@pytest.mark.parametrize("way", ["even", "dirichlet", "labels"])
def test_a_share_is_unseen_by_seed(path, module, way):
    seen, unseen = devices_of(source(path, way=way, devices=8, unseen=0.25), module)
    assert (len(seen), len(unseen)) == (6, 2)
    assert not seen.keys() & unseen.keys()
    other = devices_of(source(path, way=way, devices=8, unseen=0.25, seed=3), module)[1]
    again = devices_of(source(path, way=way, devices=8, unseen=0.25), module)[1]
    assert list(again) == list(unseen)
    assert list(other) != list(unseen)


def test_at_least_one_device_takes_part(path, module):
    seen, unseen = devices_of(source(path, devices=3, unseen=0.9), module)
    assert (len(seen), len(unseen)) == (1, 2)


def test_the_digits_need_no_file():
    seen, unseen = devices_of(SampleSource(data="digits", devices=5), classifier(8, 10))
    assert (len(seen), len(unseen)) == (5, 0)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"way": "group"}, InvalidInput, "needs the column of groups"),
        ({"group": "writer"}, InvalidInput, "needs the column of groups"),
        ({"way": "group", "group": "author"}, NotFound, "no column is called 'author'"),
        (
            {"way": "group", "group": "share"},
            InvalidInput,
            r"240 whole numbers, one for each sample; got float64\[240\]",
        ),
        ({"unseen": 1.0}, InvalidInput, r"in \[0, 1\)"),
        ({"split": "split"}, InvalidInput, "'split' .* no column of groups is named"),
        (
            {"data": "digits", "x": (), "y": (), "way": "group", "group": "writer"},
            NotFound,
            "no column is called 'writer'",
        ),
        (
            {"x": ("pixels",)},
            NotFound,
            "no column is called 'pixels'; .*; the options x, y, group and split",
        ),
        ({"x": ("images", "one")}, InvalidInput, "gives the inputs images, one and the targets"),
        ({"y": ("one",)}, InvalidInput, "all 240 samples of .* have the label 2"),
        ({"y": ("signed",)}, InvalidInput, r"classes must be .*, got -1\.\.1"),
        (
            {"data": "digits", "x": (), "y": ()},
            InvalidInput,
            r"samples as float32\[N,1,2,2\].* digits are \[1, 8, 8\] each",
        ),
    ],
)
def test_odd_sources_are_refused(path, module, options, error, said):
    with pytest.raises(error, match=said):
        devices_of(
            SampleSource(**{"data": str(path), "x": ("images",), "y": ("labels",), **options}),
            module,
        )


def test_a_table_gives_samples_and_the_names_of_devices(tmp_path, module):
    rng = np.random.default_rng(0)
    people = ["ann", "bob", "eve"]
    rows = [
        [*rng.random(4), ["lie", "sit", "run"][k % 3], people[k // 3 % 3], int(k // 3 % 3 == 2)]
        for k in range(90)
    ]
    with (tmp_path / "steps.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["p0", "p1", "p2", "p3", "does", "who", "apart"], *rows])
    options = SampleSource(
        data=str(tmp_path / "steps.csv"), x=("p*:1x2x2",), y=("does",), way="group", group="who",
        split="apart",
    )  # fmt: skip
    seen, unseen = devices_of(options, module)
    assert (list(seen), list(unseen)) == (["ann", "bob"], ["eve"])
    x, y = seen["ann"].train.values()
    assert (str(x.dtype), x.shape[1:]) == ("float32", (1, 2, 2))
    assert set(y) == {0, 1, 2}


def test_a_target_may_be_a_sequence(tmp_path):
    class Characters(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Dense(4, 8)

        def construct(self, x):
            return self.head(self.embed(x))

    trainer = train.Trainer(Characters(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 5), np.int64), np.zeros((1, 5), np.int64))
    module = trainer.export(("predict", "evaluate", "loss"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, (60, 6))
    np.savez(tmp_path / "a.npz", x=tokens[:, :-1], y=tokens[:, 1:], z=tokens[:, 1:] + 1)
    seen, _ = devices_of(SampleSource(data=str(tmp_path / "a.npz"), devices=3), module)
    assert {[*shard.train.values()][-1].shape[1:] for shard in seen.values()} == {(5,)}
    with pytest.raises(InvalidInput, match=r"8 classes apart, 0 to 7; the labels .* are 1 to 8"):
        devices_of(SampleSource(data=str(tmp_path / "a.npz"), y=("z",), devices=3), module)
    with pytest.raises(InvalidInput, match="60 whole numbers"):
        devices_of(SampleSource(data=str(tmp_path / "a.npz"), way="labels", devices=3), module)


def test_characters_are_those_of_the_model(tmp_path):
    class Characters(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 4), nn.Dense(4, 3)

        def construct(self, token):
            return self.head(self.embed(token))

    trainer = train.Trainer(
        Characters(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), labels="abc"
    )
    trainer.prepare(np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64))
    (tmp_path / "a.txt").write_text("bcbbccbccbcb" * 20)
    source = SampleSource(data=str(tmp_path / "a.txt"), form={"window": 4}, devices=2)
    seen, _ = devices_of(source, trainer.export(("predict", "evaluate", "loss")))
    for shard in seen.values():
        x, y = shard.train.values()
        assert (x[:, 1:] == y[:, :-1]).all()
        assert set(x.ravel()) == set(y.ravel()) == {1, 2}


def test_a_model_that_devices_cannot_learn_is_refused_before_data_is_read(tmp_path):
    with pytest.raises(InvalidInput, match="export it with loss"):
        devices_of(source(tmp_path / "none.npz"), classifier(entries=("predict", "evaluate")))


def test_labels_beyond_the_models_classes_are_refused():
    with pytest.raises(InvalidInput, match=r"3 classes apart, 0 to 2; the labels .* are 0 to 9"):
        devices_of(SampleSource(data="digits"), classifier(8, 3))


class Characters(nn.Cell):
    """Scores of the next of four characters; ids: (N, T) -> (N, T, 4)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def construct(self, ids):
        return self.table(ids)


def test_characters_of_another_text_have_the_numbers_of_the_model(tmp_path):
    book, other = tmp_path / "book.txt", tmp_path / "other.txt"
    book.write_text("abc" * 40)
    other.write_text("bcbbcbc" * 40)
    trainer = train.Trainer(Characters(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.fit(data.load(book, window=4), 1)
    module = trainer.export(("predict", "evaluate", "loss"))
    seen, _ = devices_of(SampleSource(data=str(other), form={"window": 4}, devices=2), module)
    ids, following = seen["device-0"].train.values()
    assert {*ids.ravel()} == {*following.ravel()} == {1, 2}  # not 0 and 1, as in `other` alone


def test_a_target_without_the_axis_of_the_output_is_refused_with_the_option(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{k},{k / 2}\n" for k in range(40)))
    trainer = train.Trainer(nn.Dense(1, 1), loss=nn.MSE(), optimizer=optim.SGD(0.001))
    trainer.prepare(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
    module = trainer.export(("predict", "evaluate", "loss"))
    wanted = r"takes targets as float32\[N,1\]; those of .*a.csv are \[\] each; .* --y speed:1"
    with pytest.raises(InvalidInput, match=wanted):
        devices_of(SampleSource(data=str(path), x=("x:1",), devices=2), module)
    seen, _ = devices_of(SampleSource(data=str(path), x=("x:1",), y=("y:1",), devices=2), module)
    assert len(seen) == 2


@pytest.fixture
def series(tmp_path):
    """60 rows of 3 persons, whose values are the numbers of the rows."""
    rows = [[k, k / 2, ["ann", "bob", "eve"][k // 20]] for k in range(60)]
    with (tmp_path / "series.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x", "y", "who"], *rows])
    return tmp_path / "series.csv"


def of_windows(path, window=4, **options):
    trainer = train.Trainer(nn.Dense(4, 4), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))
    module = trainer.export(("predict", "evaluate", "loss"))
    return devices_of(SampleSource(data=str(path), form={"window": window}, **options), module)[0]


@pytest.mark.parametrize("options", [{"way": "group", "group": "who"}, {"devices": 4}])
def test_windows_to_score_on_share_no_row_with_those_to_learn_from(series, options):
    """Not on another device either. The windows of one person hold rows of that person alone."""
    shards = of_windows(series, **options)
    learned = {x for shard in shards.values() for x in shard.train["x"].ravel().tolist()}
    scored = [shard.held_out["x"] for shard in shards.values()]
    assert learned.isdisjoint(np.concatenate(scored).ravel().tolist())
    assert [len(x) for x in scored] == [4, 4, 4] if "group" in options else [3, 3, 3, 3]
    for shard in shards.values():
        for x in (*shard.train["x"], *shard.held_out["x"]):
            assert (np.diff(x) == 1).all()
            assert len({*(x // 20)}) == 1 or "devices" in options


def test_windows_that_share_rows_are_not_dealt_at_random(series):
    with pytest.raises(InvalidInput, match=r"share rows with the 3 before them, .* by group"):
        of_windows(series, way="dirichlet", devices=3)


def test_a_device_with_too_few_windows_is_named(series):
    with pytest.raises(InvalidInput, match=r"device-0 has 7 windows, each of which shares rows"):
        of_windows(series, devices=9, held_out=0.5)


@pytest.mark.parametrize("step", ['"shuffle"', '"pick", "rows": [9, 1, 5]', '"repeat", "times": 2'])
def test_windows_in_another_order_are_not_taken_for_a_series(series, step):
    text = data.load(series, x=["x"], y=["y"], window=4).json()
    pipeline = json.loads(text)
    pipeline["steps"].append(json.loads(f'{{"step": {step}}}'))
    pipeline["source"]["path"] = str(series)
    (series.parent / "a.json").write_text(json.dumps(pipeline))
    with pytest.raises(InvalidInput, match=r"the step \w+ of .* changes the order of windows"):
        of_windows(series.parent / "a.json", window=None)
