"""The page: one file that needs nothing, the numbers of the study in it."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.study import page, picture, simulate
from triplane.unified_ir.federated.study.draw import MAX_DOTS, Column, dots
from triplane.unified_ir.federated.study.trial import DeviceScore, RoundRow, Trial, summary

from .given import module, shards, study, there


@pytest.fixture(scope="module")
def trials():
    return [
        simulate(
            module(), shards(), study(name, evaluate_every=2, rates=rates),
            unseen=shards(2, first=8),
        )
        for name, rates in (("fedavg", (0.05, 0.2)), ("maml", ()))
    ]  # fmt: skip


class Tags(HTMLParser):
    """Opened tags by name, their attributes, and whether each is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other_file(trials):
    text = page(trials, "<digits> & others", {"rounds": "4", "data": "<x>"})
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert not {name for name, _ in tags.attributes} & {"src", "href", "onload"}
    assert "&lt;digits&gt; &amp; others" in text
    assert "data <b>&lt;x&gt;</b>" in text


def test_the_table_says_what_was_measured(trials):
    text = page(trials, "t")
    for trial in trials:
        for seen, group in ((True, "training"), (False, "unseen")):
            found = there(summary(trial.final(seen=seen)))
            rate = trial.best_rate(seen=seen)
            cells = [
                f"{trial.algorithm}, {group}", str(found.devices), f"{100 * found.before:.1f}",
                f"{100 * found.after:.1f}", "own" if rate is None else f"{rate[0]:g}",
            ]  # fmt: skip
            assert "".join(f"<td>{cell}</td>" for cell in cells) in text


def test_there_are_dots_lines_and_losses(trials):
    charts = re.findall(r"<title>(.*?)</title>", page(trials, "t"))[1:]
    assert charts == [
        "Devices before and after adaptation", "Adapted accuracy of training devices",
        "Adapted accuracy of unseen devices", "Loss of local steps",
    ]  # fmt: skip


def test_a_picture_has_two_dots_per_device_and_is_the_same_again(trials):
    made = picture(trials, "before & after")
    root = ET.fromstring(made)
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 2 * 2 * (4 + 2)
    assert made == picture(trials, "before & after")


def test_many_devices_are_thinned():
    column = Column("fedavg", "unseen", [(k / 5000, k / 5000) for k in range(5000)])
    assert dots([column], "t").count("<circle") <= 2 * MAX_DOTS


def score(device, after, round_=2):
    return DeviceScore(device, True, round_, 10, 0.5, after)


def test_the_worst_tenth_is_the_mean_of_the_lowest():
    found = there(summary([score(f"d{k}", k / 20) for k in range(20)]))
    assert found.after_worst_tenth == pytest.approx((0 / 20 + 1 / 20) / 2)
    assert there(summary([score("a", 0.3), score("b", 0.9)])).after_worst_tenth == 0.3
    assert summary([]) is None


def test_the_best_rate_is_that_of_the_best_mean_and_final_scores_are_its():
    sweep = {0.1: [score("a", 0.5), score("b", 0.5)], 0.3: [score("a", 0.9), score("b", 0.2)]}
    made = Trial("fedavg", [RoundRow(2, 2, 0.1, 0, 0, 0.0)], [score("a", 0.99)], sweep, {})
    assert there(made.best_rate(seen=True))[0] == 0.3
    assert made.final(seen=True) == tuple(sweep[0.3])
    assert made.best_rate(seen=False) is None


def test_a_page_of_nothing_is_refused():
    with pytest.raises(InvalidInput, match="at least one run"):
        page([], "t")
