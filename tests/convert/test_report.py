"""Reports as text, JSON and SVG."""

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from tests.convert.latencies import latency

from triplane.unified_ir.convert.budgets import Budgets
from triplane.unified_ir.convert.latency import Quartiles
from triplane.unified_ir.convert.report import Accuracy, Layer, Report, Size
from triplane.unified_ir.convert.residency import Resident

IN_INT8 = Layer(name="conv", op="Conv", location="a.py:3", kernel="QLinearConv", int8=True,
                snr_db=40.0)  # fmt: skip
IN_FLOAT = replace(IN_INT8, name="fc", kernel="Gemm", int8=False, reason="no kernel", snr_db=None)


def report(**changes):
    base = Report(
        name="net", version="1", target="ort-x64", precision="int8",
        size=Size(float32=2100, float32_weights=2000, int8=1000, int8_weights=500),
        latency=latency(1e-2, 2e-2, 1e-2), accuracy=None, layers=(IN_INT8,),
        residency=Resident({"QLinearConv": 1}, {"QuantizeLinear": 1}, {}, ("QLinearConv",)),
        machine={"architecture": "x86_64"},
    )  # fmt: skip
    return replace(base, **changes)


def ratio(found, value):
    return replace(found, ratio=Quartiles(value, value, value))


SLOWER = "int8 is SLOWER here"
UNDECIDED = "int8 is 2.1x smaller; its speed is UNDECIDED here"
VERDICTS = {
    f"{SLOWER} (1.4x) and 2.1x smaller: the network is too small for int8 to pay": {
        "latency": ratio(latency(1e-5, 2e-5, 1e-5), 1.4)
    },
    f"{SLOWER} (2.0x) and 2.1x smaller: 1 of 2 layers stayed in float": {
        "latency": ratio(latency(1e-2, 2e-2, 1e-2), 2),
        "layers": (IN_INT8, IN_FLOAT),
    },
    f"{SLOWER} (2.0x) and 2.1x smaller: "
    "converting to bytes and back costs more than the products save": {
        "latency": ratio(latency(1e-2, 2e-2, 1e-2), 2)
    },
    "int8 is faster here (2.0x) and 2.1x smaller": {
        "latency": ratio(latency(1e-2, 5e-3, 1e-2), 0.5)
    },
    f"{UNDECIDED} (interleaved runs scatter too much)": {"latency": latency(1e-2, 1e-2, 1e-2)},
    f"{UNDECIDED} (this machine is not ort-x64; measure there)": {
        "latency": latency(1e-2, 1e-3, 1e-2, on_target=False)
    },
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_first_line_says_what_the_conversion_means(verdict):
    made = report(**VERDICTS[verdict])
    assert made.verdict == verdict
    assert made.text().splitlines()[0] == verdict
    assert str(made) == made.text()
    assert made.record()["verdict"] == verdict


def test_the_record_is_json_and_holds_no_digest():
    made = report(digest="d" * 64, accuracy=Accuracy(samples=9, before=1, after=0.5, agreement=1))
    text = json.dumps(made.record(), allow_nan=False)
    assert "d" * 64 not in text
    assert json.loads(text)["accuracy"]["drop_points"] == 50


def test_a_layer_in_float_says_why():
    assert "in float: no kernel" in report(layers=(IN_INT8, IN_FLOAT)).text()


def test_the_page_is_well_formed_and_begins_with_the_verdict():
    made = report(accuracy=Accuracy(samples=9, before=1, after=0.5, agreement=1))
    root = ET.fromstring(made.svg())
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == made.verdict.partition(": ")[0]
    assert {"Size of graph and weights", "Accuracy on 9 samples"} <= set(texts)


def test_an_undecided_latency_budget_is_a_note_and_no_refusal():
    between = replace(latency(1e-2, 1e-2, 1e-2), ratio=Quartiles(0.8, 1.0, 1.2))
    assert "is undecided" in Budgets(latency_ratio=1.0).check(report(latency=between))[0]
    assert Budgets(latency_ratio=1.3).check(report(latency=between)) == ()
