"""The page in a real browser: what a person sees and can do."""

import pytest

from triplane.cloud.dashboard import NodeIncident
from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import COMMITTED, FAILED, RETURNED, Incident, Node, Rollout

pytestmark = pytest.mark.slow
TOKEN = "operator-token-of-this-test"
WAIT_S = 15
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture
def page(browser, address):
    browser.set_window_size(1200, 1000)
    browser.get_log("browser")
    browser.get(address)
    until(browser, "return document.querySelectorAll('#nodes tr').length > 0")
    yield browser
    complaints = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    browser.get("about:blank")
    expected = ("403", "409", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE")
    assert [c for c in complaints if not any(word in c["message"] for word in expected)] == []


def until(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT_S, 0.05).until(lambda b: b.execute_script(script))


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def click(browser, selector):
    browser.find_element("css selector", selector).click()


def buttons(browser):
    return [made.text for made in browser.find_elements("css selector", "#rollouts button")]


def use_token(browser, token):
    click(browser, "#operator")
    browser.find_element("id", "token").send_keys(token)
    click(browser, "#ask-token button[value=ok]")


def keep(shots, browser, name):
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(shots / f"{name}.png"))


def test_the_page_shows_nodes_waves_reasons_versions_and_incidents(page, shots):
    assert len(page.find_elements("css selector", "#nodes tr")) == 40
    rollout = text(page, "#rollouts")
    assert "1 of 10 nodes of wave 2 failed, more than 5%" in rollout
    assert "camera-07 failed: golden sample 3" in rollout
    assert "5 of 8, 1 failed" in rollout
    assert len(page.find_elements("css selector", "#rollouts .wave")) == 3
    assert len(page.find_elements("css selector", "#rollouts .bar .good")) == 7
    assert "not signed" in text(page, "#versions")
    assert "golden" in text(page, "#incidents")
    assert text(page, "#link") == "live"
    assert "36 of 40 nodes connected" in text(page, "#totals")
    keep(shots, page, "light")


def test_the_page_shows_rounds_stragglers_refusals_and_a_dot_for_each_device(page, shots):
    run = text(page, "#runs")
    assert "maml among phones, round 4 of 5" in run
    assert "11 of 12 devices" in run
    assert "after round 3: mean 50.0%, worst 30.0%; adapted: mean 87.5%, worst 75.0%" in run
    why = "its stream was away too long"
    assert f"phone-07: 2 of 5 contributions not counted, away: {why}" in run
    assert "loss 0.5 in round 2" in run  # the third was given up
    assert "lowest after adaptation: phone-00 75.0%, phone-01 76.7%, phone-02 78.3%" in run
    assert "2 refused (nan): phone-03: 'head.weight' holds NaN" in run
    kinds = [
        made.get_attribute("class")
        for made in page.find_elements("css selector", "#runs .bar span")
    ]
    assert kinds == ["good", "warn", "bad", "busy", "idle"]
    for name in ("before", "after"):
        assert len(page.find_elements("css selector", f"#runs circle.{name}")) == 12
    keep(shots, page, "runs")


def large_run() -> Run:
    """Round 53 of 400, each of them with a loss, each tenth evaluated."""
    run = Run(id="5" * 16, phase=Run.COLLECTING, round=53, started_s=1.8e9)
    run.spec.model, run.spec.population, run.spec.rounds = "digits@4", "phones", 400
    for i in range(1, 54):
        run.rounds.add(number=i, opened_s=1.7e9, closed_s=1.7e9 + 1, asked=3, counted=3, loss=1 / i)
        if i % 10 == 0:
            judged = run.rounds.add(number=i, evaluates=True, asked=3, counted=3)
            judged.before.mean, judged.after.mean = 0.5, 0.5 + i / 200
    return run


def test_of_masked_scores_the_page_shows_the_means_only(page, fleet):
    run = large_run()
    for judged in run.rounds:
        if judged.evaluates:
            judged.before.masked = judged.after.masked = True
    for number in range(3):
        run.members.add(device=f"phone-{number}", connected=True, counted=50)
    fleet.held_runs = [run]
    shown = "after round 50: mean 50.0%, masked; adapted: mean 75.0%, masked"
    until(page, f"return document.querySelector('#runs').innerText.includes('{shown}')")
    run_ = text(page, "#runs")
    assert "worst" not in run_
    assert "lowest" not in run_
    assert "held-out accuracy, mean" in run_
    assert not page.find_elements("css selector", "#runs circle.before, #runs circle.after")


def test_the_bar_of_a_run_is_as_full_as_the_run_is_far(page, fleet):
    fleet.held_runs = [large_run()]
    until(page, "return document.querySelector('#runs .bar.dense') !== null")
    done = page.execute_script(
        "const bar = document.querySelector('#runs .bar');"
        "return 1 - bar.querySelector('.idle').offsetWidth / bar.offsetWidth"
    )
    assert done == pytest.approx(53 / 400, abs=0.02)


def test_rounds_before_the_newest_have_the_colours_of_their_outcomes(page, fleet):
    run = Run(id="6" * 16, phase=Run.COLLECTING, round=200, started_s=1.8e9)
    run.spec.model, run.spec.population, run.spec.rounds = "digits@4", "phones", 400
    for i in range(1, 201):
        run.rounds.add(number=i, opened_s=1, closed_s=2, asked=3, counted=2 if i % 3 == 0 else 3)
    for round_ in run.rounds[:60:2]:
        round_.counted, round_.given_up = 0, "2 of 3 needed"
    fleet.held_runs = [run]
    until(page, "return document.querySelector('#runs .bar.dense') !== null")
    pieces = page.execute_script(
        "const bar = document.querySelector('#runs .bar');"
        "return [...bar.children].slice(0, 3)"
        ".map((e) => [e.className, e.title, e.offsetWidth / bar.offsetWidth])"
    )
    assert [kind for kind, _, _ in pieces] == ["good", "warn", "bad"]
    title = "rounds 1 to 140: 74 complete, 36 partial, 30 abandoned"
    assert {text for _, text, _ in pieces} == {title}
    shares = [share for _, _, share in pieces]
    assert shares == pytest.approx([74 / 400, 36 / 400, 30 / 400], abs=0.02)


def test_a_run_shows_its_curves_and_on_request_its_rounds_and_devices(page, fleet, shots):
    fleet.held_runs = [large_run(), *fleet.held_runs]
    until(page, "return document.querySelectorAll('#runs .curves').length === 2")
    labels = page.execute_script(
        "return [...document.querySelectorAll('#runs .curves svg')].map((e) => e.ariaLabel)"
    )
    assert labels[0] == "training loss: 1.00 in round 1, 0.0189 in round 53"
    assert labels[1].endswith(": 55.0% in round 10, 75.0% in round 50")
    page.execute_script("for (const e of document.querySelectorAll('#runs summary')) e.click()")
    until(page, "return document.querySelectorAll('#runs td').length > 0")
    assert "phone-07" in text(page, "#runs")
    run = Run()
    run.CopyFrom(fleet.held_runs[0])
    run.round = 54
    fleet.held_runs = [run, fleet.held_runs[1]]
    until(page, "return document.querySelector('#runs').innerText.includes('round 54 of 400')")
    assert page.execute_script("return document.querySelector('#runs details').open")
    keep(shots, page, "curves")


def test_old_rollouts_fold_and_those_under_way_do_not(page, fleet):
    old = [
        Rollout(id=f"r-{i}", model="old", version=i, state=Rollout.DONE, created_s=1.8e9 + i,
                ended_s=1.8e9 + i)
        for i in range(10)
    ]  # fmt: skip
    fleet.held_rollouts = [*old, *fleet.held_rollouts]
    until(page, "return document.querySelectorAll('#rollouts article').length === 4")
    shown = text(page, "#rollouts")
    assert "old@9" in shown
    assert "old@6" not in shown
    assert "digits@4" in shown  # paused, the oldest of all
    assert text(page, "#rollouts-older") == "7 older rollouts"


def test_a_node_opens_to_its_models_rollouts_and_incidents(page, fleet, shots):
    page.execute_script(
        "[...document.querySelectorAll('#nodes button')]"
        ".find((e) => e.innerText === 'camera-07').click()"
    )
    detail = text(page, "#detail")
    assert detail.count("golden sample 3: |y - g| = 4.1 > 0.002") == 3
    assert "digits@4" in detail
    keep(shots, page, "node")
    fleet.held_nodes = [node for node in fleet.held_nodes if node.name != "camera-07"]
    until(page, "return document.querySelector('#detail').innerText.includes('was removed')")
    click(page, "#detail [data-close]")


def test_a_long_reason_breaks_no_word_of_another_column(page, fleet, shots):
    node = Node()
    node.CopyFrom(fleet.held_nodes[0])
    node.report.models[0].state = FAILED
    node.report.models[0].reason = "the model answers differently " * 15
    fleet.held_nodes = [node, *fleet.held_nodes[1:]]
    until(page, "return document.querySelector('#nodes .reason') !== null")
    heights = page.execute_script(
        "return [...document.querySelectorAll('#nodes tr:first-child .label')]"
        ".map((e) => e.getClientRects().length)"
    )
    assert heights == [1, 1]
    name = page.execute_script(
        "const b = document.querySelector('#nodes button');"
        "return b.getBoundingClientRect().height / parseFloat(getComputedStyle(b).lineHeight)"
    )
    assert name < 1.5
    keep(shots, page, "long")


def test_a_round_that_ends_shows_without_a_reload(page, fleet):
    run = Run()
    run.CopyFrom(fleet.held_runs[0])
    run.phase, run.result = Run.DONE, "digits@5"
    fleet.held_runs = [run]
    until(page, "return document.querySelector('#runs').innerText.includes('result digits@5')")


def test_a_change_in_the_cloud_shows_without_a_reload(page, fleet):
    node = Node()
    node.CopyFrom(fleet.held_nodes[0])
    node.name = "camera-99"
    fleet.held_nodes = [*fleet.held_nodes[1:], node]
    until(page, "return document.querySelector('#nodes').innerText.includes('camera-99')")
    assert "camera-00" not in text(page, "#nodes")
    done = Rollout()
    done.CopyFrom(fleet.held_rollouts[0])
    done.state = Rollout.DONE
    for row in done.nodes:
        row.state = COMMITTED
    fleet.held_rollouts = [done]
    until(page, "return document.querySelectorAll('#rollouts .bar .good').length === 40")


def test_an_empty_cloud_says_how_to_begin_but_not_before_it_has_answered(browser, address, fleet):
    for name in ("nodes", "rollouts", "runs", "versions", "incidents"):
        setattr(fleet, f"held_{name}", [])
    shown = "return [...document.querySelectorAll('p.empty')].filter((e) => !e.hidden).length"
    browser.get(address)
    until(browser, f"{shown} === 5")
    # As it is before the first message.
    browser.execute_script(
        "source.close(); heardMs = 0; for (const name of Object.keys(LISTS)) draw(name);"
    )
    assert browser.execute_script(shown) == 0
    browser.get("about:blank")


def test_what_is_due_stands_above_everything_and_goes_when_it_is_done(page, fleet):
    assert text(page, "#due") == ""
    fleet.held_due = ["the signatures of people for root expire on 2031-01-30; <b>renew</b>"]
    until(page, "return document.querySelectorAll('#due li').length === 1")
    assert text(page, "#due") == fleet.held_due[0]
    fleet.held_due = []
    until(page, "return document.querySelector('#due').hidden")


def test_what_a_node_says_stays_text(page, fleet):
    node = Node(name=HOSTILE, labels={HOSTILE: HOSTILE, "__proto__": "x"}, connected=True)
    node.report.serving_address = HOSTILE
    node.report.models.add(model=HOSTILE, version=2, state=FAILED, reason=HOSTILE)
    rollout = Rollout(
        id=HOSTILE, model=HOSTILE, selector=HOSTILE, reason=HOSTILE, state=Rollout.DONE
    )
    rollout.nodes.add(name=HOSTILE, state=FAILED, reason=HOSTILE)
    incident = Incident(time_s=1, kind=HOSTILE, text=HOSTILE)
    fleet.held_nodes = [node]
    fleet.held_rollouts = [rollout]
    fleet.held_incidents = [NodeIncident(HOSTILE, incident)]
    until(page, "return document.querySelector('#nodes').innerText.includes('onerror')")
    for section in ("#nodes", "#rollouts", "#incidents"):
        assert "<script>" in text(page, section)
    assert page.execute_script("return document.querySelectorAll('img, script').length") == 1
    assert page.title == "Triplane fleet"


def test_buttons_appear_with_the_token_and_go_with_it(page):
    assert buttons(page) == []
    use_token(page, "wrong")
    until(
        page,
        "return document.querySelector('#notice').textContent.includes('not the operator token')",
    )
    assert buttons(page) == []
    use_token(page, TOKEN)
    until(page, "return document.querySelectorAll('#rollouts button').length === 2")
    assert buttons(page) == ["resume", "abort"]
    assert TOKEN not in page.current_url
    assert TOKEN not in page.page_source
    click(page, "#operator")
    until(page, "return document.querySelectorAll('#rollouts button').length === 0")


def test_resume_asks_for_a_reason_and_the_rollout_runs(page, fleet, shots):
    use_token(page, TOKEN)
    until(page, "return document.querySelectorAll('#rollouts button').length === 2")
    click(page, "#rollouts button")
    page.find_element("id", "change-reason").send_keys("lens cleaned")
    keep(shots, page, "asking")
    click(page, "#change-ok")
    until(page, "return document.querySelector('#rollouts .pill').textContent === 'running'")
    assert fleet.asked == [("r-7c41", "lens cleaned")]
    until(page, "return document.querySelector('#rollouts button').textContent === 'pause'")


def test_nodes_that_an_abort_took_back_are_not_drawn_as_failed(page, fleet):
    rollout = Rollout(id="r-back", model="digits", version=5, selector="all", state=Rollout.ABORTED)
    for name, state in (("a", RETURNED), ("b", RETURNED), ("c", FAILED)):
        rollout.nodes.add(name=name, state=state, connected=True)
    fleet.held_rollouts = [rollout]
    until(page, "return document.querySelectorAll('#rollouts .bar span').length === 3")
    bars = page.find_elements("css selector", "#rollouts .bar span")
    assert [bar.get_attribute("class") for bar in bars] == ["warn", "warn", "bad"]
    assert "0 of 3, 1 failed, 2 returned" in text(page, "#rollouts")


def test_a_thousand_nodes_are_drawn_by_counts(page, fleet, shots):
    rollout = Rollout(id="r-big", model="digits", version=5, selector="all", state=Rollout.RUNNING)
    for i in range(1000):
        rollout.nodes.add(name=f"n{i}", state=FAILED if i < 3 else COMMITTED, connected=True)
    fleet.held_rollouts = [rollout]
    node = fleet.held_nodes[0]
    fleet.held_nodes = [Node(name=f"n{i:04}", labels=node.labels) for i in range(1000)]
    until(page, "return document.querySelectorAll('#nodes tr').length === 1000")
    widths = page.execute_script(
        "return [...document.querySelectorAll('#rollouts .bar span')].map((e) => e.offsetWidth)"
    )
    assert len(widths) == 2
    assert widths[0] > 100 * widths[1] > 0
    assert "997 of 1000, 3 failed" in text(page, "#rollouts")
    keep(shots, page, "large")


def test_leaving_the_question_changes_nothing(page, fleet):
    use_token(page, TOKEN)
    until(page, "return document.querySelectorAll('#rollouts button').length === 2")
    click(page, "#rollouts button.danger")
    assert page.find_element("id", "change-revert").is_displayed()
    click(page, "#ask-change [data-close]")
    until(page, "return !document.querySelector('#ask-change').open")
    click(page, "#rollouts button.danger")
    page.execute_script("document.querySelector('#ask-change').close()")
    until(page, "return !document.querySelector('#ask-change').open")
    assert fleet.asked == []


def test_a_refused_change_says_why(page, fleet):
    use_token(page, TOKEN)
    until(page, "return document.querySelectorAll('#rollouts button').length === 2")
    click(page, "#rollouts button")
    fleet.held_rollouts[0].state = Rollout.DONE  # while the question stands
    click(page, "#change-ok")
    until(page, "return document.querySelector('#notice').textContent.includes('r-7c41')")


def test_the_filter_finds_names_and_labels(page):
    box = page.find_element("id", "filter")
    box.send_keys("line=1")
    seen = "return [...document.querySelectorAll('#nodes tr')].filter((r) => !r.hidden).length"
    assert page.execute_script(seen) == 13
    box.clear()
    box.send_keys("CAMERA-07")
    assert page.execute_script(seen) == 1


def test_both_themes_have_readable_contrast(page, shots):
    for theme in ("light", "dark"):
        page.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        for selector in ("h1", "th", ".soft", ".pill.bad", ".pill.warn", ".good", "#notice"):
            ratio = page.execute_script(CONTRAST, selector)
            assert ratio >= 4.5, f"{theme} {selector}: {ratio:.2f}"
    keep(shots, page, "dark")


CONTRAST = """
const luminance = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((v) => {
    const c = v / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const made = document.querySelector(arguments[0]);
let ground = made;
while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") {
  ground = ground.parentElement;
}
const a = luminance(getComputedStyle(made).color);
const b = luminance(getComputedStyle(ground || document.body).backgroundColor);
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
"""


def test_a_telephone_shows_everything_without_scrolling_sideways(page, shots):
    size = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        until(page, "return window.innerWidth === 375")
        assert page.execute_script("return document.documentElement.scrollWidth") <= 375
        overflowing = page.execute_script(
            "return [...document.querySelectorAll('main *')]"
            ".filter((e) => e.getBoundingClientRect().right > 376).map((e) => e.outerHTML)"
        )
        assert overflowing == []
        keep(shots, page, "telephone")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
