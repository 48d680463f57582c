"""The page: one file that needs nothing, the numbers of the study in it."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from statistics import mean
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.support.page_policy import check_policy, policy_of

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.study import (
    difference,
    page,
    picture,
    report,
    rounds_csv,
    scores_csv,
    simulate,
    verdicts,
)
from triplane.unified_ir.federated.study.export import trial_record
from triplane.unified_ir.federated.study.figures import COLOURS
from triplane.unified_ir.federated.study.report import STYLE, charts
from triplane.unified_ir.federated.study.seeds import adaptation_gain
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


LAST = RoundRow(2, 2, 0.1, 0, 0, 0.0)


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
    assert not {name for name, _ in tags.attributes} & {"src", "onload", "style"}
    links = [value for name, value in tags.attributes if name == "href"]
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"url\(|@import", text)
    assert "&lt;digits&gt; &amp; others" in text
    assert "<td>data</td><td>&lt;x&gt;</td>" in text


def test_the_policy_allows_the_page_s_own_script_and_style_only(trials):
    text = page(trials, "t")
    check_policy(text, policy_of(text))


def test_the_data_of_the_study_is_in_the_page(trials):
    links = re.findall(r"download='(.*?)' href='data:.*?;base64,(.*?)'", page(trials, "t"))
    contents = {name: base64.b64decode(data).decode() for name, data in links}
    assert contents["scores.csv"] == scores_csv(trials)
    assert contents["rounds.csv"] == rounds_csv(trials)
    assert json.loads(contents["study.json"]) == {"trials": [trial_record(t) for t in trials]}


def test_the_tables_say_what_was_measured(trials):
    text = cells_of(page(trials, "t"))
    for trial in trials:
        for seen in (True, False):
            found = there(summary(trial.final(seen=seen)))
            rate = trial.best_rate(seen=seen)
            gain = there(adaptation_gain([trial], seen=seen))
            start = [s.before for s in trial.start if s.seen is seen]
            cells = [
                trial.algorithm, f"{100 * sum(start) / len(start):.1f}",
                f"{100 * found.before:.1f}", f"{100 * found.after:.1f}",
                f"{100 * gain.mean:+.2f} ± {100 * gain.margin:.2f}",
                against(trial, trials[0], seen), "own" if rate is None else f"{rate[0]:g}",
                f"{100 * found.before_worst_tenth:.1f}", f"{100 * found.after_worst_tenth:.1f}",
            ]  # fmt: skip
            assert "".join(f"<td>{cell}</td>" for cell in cells) in text
        costs = [trial.algorithm, "4", f"{trial.bytes_up / 1e6:,.1f}"]
        assert "".join(f"<td>{cell}</td>" for cell in costs) in text
    assert "Devices that learned: 4" in text
    assert "Devices that never took part: 2" in text


def cells_of(text):
    """The page without bold type and the names of columns in cells."""
    return re.sub(r"</?b>| data-label='.*?'", "", text)


def against(trial, first, seen):
    if trial is first:
        return ""
    apart = there(difference(trial.final(seen=seen), first.final(seen=seen)))
    return f"{100 * apart.mean:+.2f} ± {100 * apart.margin:.2f}"


def made(name, afters):
    scores = [score(f"d{k}", after) for k, after in enumerate(afters)]
    return Trial(name, [LAST], scores, {}, {})


def test_the_best_is_said_and_set_in_bold():
    trials = [made("a", [0.5, 0.7]), made("b", [0.9, 0.8]), made("c", [0.8, 0.9])]
    text = re.sub(r" data-label='.*?'", "", page(trials, "t"))
    bold = re.findall(r"<td>(\w)</td><td></td><td>[^/]*</b></td><td><b>(.{4})</b>", text)
    assert bold == [("b", "85.0"), ("c", "85.0")]


def test_who_is_ahead_is_told_from_whom_chance_may_have_put_there():
    ahead, near, far = [0.9, 0.8, 0.9, 0.8], [0.8, 0.9, 0.9, 0.7], [0.5, 0.4, 0.6, 0.4]
    trials = [made("far", far), made("near", near), made("ahead", ahead)]
    (said,) = verdicts(trials)
    assert said.endswith(": ahead 85.0; not significantly different: near 82.5; behind: far 47.5.")
    text = page(trials, "t")
    assert said in text
    assert "<th>against far</th>" in text
    assert "<td>+37.50 ± 7.95</td>" in cells_of(text)
    assert verdicts(trials[:1]) == []


def test_a_difference_is_of_pairs_and_its_error_numpys():
    rng = np.random.default_rng(0)
    a, b = rng.random(30), rng.random(30)
    found = there(difference(made("a", a).scores, reversed(made("b", b).scores)))
    assert found.mean == pytest.approx((a - b).mean())
    # 2.04523 is the 0.975 quantile of Student's t with 29 degrees of freedom.
    error = (a - b).std(ddof=1) / np.sqrt(30)
    assert found.margin == pytest.approx(2.04523 * error, rel=1e-4)
    assert found.shown == (abs(found.mean) > found.margin)
    assert difference((), made("b", b).scores) is None
    one = there(difference(made("a", a[:1]).scores, made("b", b).scores))
    assert (one.mean, one.margin, one.shown) == (a[0] - b[0], np.inf, False)


def test_there_are_dots_lines_and_losses(trials):
    areas = re.findall(r"<svg class='area' role='img' aria-label='(.*?)'>", page(trials, "t"))
    assert areas == [
        "Unadapted accuracy of training devices", "Adapted accuracy of training devices",
        "Unadapted accuracy of unseen devices", "Adapted accuracy of unseen devices",
        "Loss of local steps",
        "fedavg, training devices", "maml, training devices",
        "fedavg, unseen devices", "maml, unseen devices",
    ]  # fmt: skip


def test_a_mark_says_its_device_and_values(trials):
    text = page(trials, "t")
    (score, *_) = trials[1].final(seen=True)
    said = f"{100 * score.before:.1f} before, {100 * score.after:.1f} adapted (10 samples)"
    assert f"<title>{score.device}: {said}</title>" in text
    start = mean([s.before for s in trials[1].start if s.seen])
    assert f"<title>maml, round 0: {100 * start:.1f}</title>" in text
    assert f"<td data-label='device'>{score.device}</td>" in text


def test_texts_from_outside_are_escaped_everywhere(trials):
    evil = "<b>'\"&"
    odd = [
        replace(t, scores=[replace(s, device=evil + s.device) for s in t.scores], sweep={})
        for t in trials
    ]
    text = page(odd, evil, {evil: evil})
    without_data = re.sub(r"base64,[^']*", "", text)
    assert evil not in without_data
    assert "&lt;b&gt;&#x27;&quot;&amp;device-0" in text


def test_data_that_is_too_large_for_the_page_is_named(trials, monkeypatch):
    assert "Not within this page" not in page(trials, "t")
    monkeypatch.setattr(report, "MAX_FILE_BYTES", len(rounds_csv(trials).encode()))
    text = page(trials, "t")
    assert re.findall("download='([^']*)'", text) == ["rounds.csv"]
    assert "Not within this page, because larger than 0 MiB: scores.csv, study.json." in text


def test_a_title_keeps_no_control_characters(trials):
    # The title has the name of the model's file, which may reverse the text or hold no character.
    text = page(trials, "a\x00b\x1b[31m\u202ec\udcff.tpm", {"data": "d\u202e"})
    assert "<h1>a b [31m c .tpm</h1>" in text
    assert all(c.isprintable() for c in text.replace("\n", ""))


def test_losses_of_many_rounds_are_drawn_as_means(trials):
    rounds = [RoundRow(k + 1, 2, float(k % 2), 0, 0, 0.0) for k in range(120)]
    (*_, chart) = charts([replace(trials[0], rounds=rounds)])
    assert "mean of 2 rounds" in chart
    (path,) = re.findall(r"<polyline[^>]*points='([^']*)'", chart)
    heights = {point.partition(",")[2] for point in path.split()}
    assert len(path.split()) == 60
    assert len(heights) == 1


def test_a_picture_has_two_dots_per_device_and_is_the_same_again(trials):
    made = picture(trials, "before & after")
    root = ET.fromstring(made)
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 2 * 2 * (4 + 2)
    assert made == picture(trials, "before & after")


def test_many_devices_are_drawn_in_part_and_listed_in_part(trials):
    scores = [score(f"device-{k:04}", k / 1000) for k in range(1000)]
    text = page([replace(trials[0], scores=scores, sweep={}, rounds=[LAST])], "t")
    assert text.count("class='mark' data-key") == 334  # every third one
    assert text.count("<td data-label='device'>") == 200
    assert "200 of 1000; the files list all" in text


def test_colours_are_distinct_from_the_paper_in_both_schemes():
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): (#\w{6})", part))
        for part in STYLE.partition("prefers-color-scheme: dark")[::2]
    )
    assert light.keys() - dark.keys() == set()
    for scheme in (light, dark):
        for name in (f"s{k}" for k in range(COLOURS)):
            assert contrast(scheme[name], scheme["paper"]) >= 3
        for text, paper in (("ink", "raised"), ("soft", "raised"), ("warn", "warn-paper")):
            assert contrast(scheme[text], scheme[paper]) >= 4.5


def contrast(a, b):
    """Ratio of luminances, as WCAG 2 defines it."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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
