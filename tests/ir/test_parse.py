"""The text form reads back: same text, same bytes; anything else is refused with its line."""

import random
import time

import numpy as np
import pytest
from tests.golden.ir.make import every_field
from tests.ir import graphs
from tests.ir.graphs import SMALL, small

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.codec import encode_function
from triplane.unified_ir.ir.parse import parse_function
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.table import TABLE


def constants(function):
    return [v for n in function.walk() for v in n.attrs.values() if isinstance(v, np.ndarray)]


def assert_reads_back(function):
    read = parse_function(function_text(function), constants(function))
    assert function_text(read) == function_text(function)
    assert encode_function(read) == encode_function(function)
    return read


@pytest.mark.parametrize(("row", "samples"), graphs.PARTS_OF_ROWS)
def test_every_sample_of_a_row_reads_back(row, samples):
    for sample in samples:
        function, _ = graphs.of_sample(row, sample)
        check_function(assert_reads_back(function))
        loss = graphs.scalar(function) if row.differentiable and sample.smooth != () else None
        if loss is not None:
            assert_reads_back(value_and_grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize("name", graphs.WITH_REGIONS)
def test_regions_read_back(name):
    for function in graphs.with_gradients(name):
        check_function(assert_reads_back(function))


def test_every_kind_of_attribute_reads_back():
    assert_reads_back(every_field().functions["f"])
    assert_reads_back(small())
    assert_reads_back(graphs.module().functions["predict"])


def test_a_constant_that_was_not_given_is_refused():
    text = function_text(graphs.module().functions["predict"])
    with pytest.raises(InvalidInput, match=r"line \d+: no constant float32\[400\] with the digest"):
        parse_function(text)


# fmt: off
WRONG = {
    "no function": ("x", "line 1: expected 'function '"),
    "no end": (SMALL.rsplit("\n", 1)[0], "the text ends"),
    "something after": (SMALL + "\nmore", "unexpected text after"),
    "no version": (SMALL.replace("MaxPool@22 ", ""), "has no version of 'MaxPool'"),
    "two versions": (SMALL.replace("MaxPool@22", "MaxPool@22 MaxPool@21"), "each operator once"),
    "another number": (SMALL.replace("%4: bool", "%7: bool"), "value %7 is number 4"),
    "unknown value": (SMALL.replace("return %2", "return %9"), "%9 is not computed"),
    "unknown parameter": (SMALL.replace("(%x, none)", "(%z, none)"), "%z is not computed"),
    "unknown type": (SMALL.replace("%3: bool[2]", "%3: boo[2]"), "no element type 'boo'"),
    "bad size": (SMALL.replace("float32[N,1,4,4]", "float32[N,1,4,x y]"), "cannot read dimension"),
    "negative size": (SMALL.replace("%3: bool[2]", "%3: bool[-2]"), "a dimension is"),
    "another result type": (SMALL.replace("return %2, %4", "return %4, %4"), "is returned"),
    "lost result": (SMALL.replace("return %2, %4", "return %2"), "1 values returned for 2"),
    "open tuple": (SMALL.replace("(2, 2), strides", "(2, 2, strides"), r"expected|cannot read"),
    "no such element": (SMALL.replace("{true, false}", "{true, 1}"), "a bool is"),
    "lost element": (SMALL.replace("{true, false}", "{true}"), "2 elements, the text has 1"),
    "huge number": (SMALL.replace("a=1", "a=" + "9" * 5000), "whole number below"),
    "same parameter": (SMALL.replace('%"odd name": i', "%x: i").replace('%"odd name"', "%x"),
                       "needs a unique name"),
    "open text": (SMALL.replace('"t\\n"', '"t'), "line 7: "),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_other_text_is_refused_with_its_line(name):
    text, match = WRONG[name]
    with pytest.raises(InvalidInput, match=r"line \d+: ") as caught:
        parse_function(text)
    assert caught.match(match)


def test_regions_nest_to_the_limit():
    depth = limits.MAX_REGION_DEPTH + 2
    text = "ops x.A@1\nfunction f() -> () {\n" + "x.A() {\nregion r() -> () {\n" * depth
    with pytest.raises(InvalidInput, match=r"nest deeper|expected"):
        parse_function(text)


@pytest.mark.slow
def test_mutated_text_is_refused_or_sound():
    rng = random.Random(5)
    sources = [f for name in graphs.WITH_REGIONS for f in graphs.with_gradients(name)[:2]]
    texts = [SMALL, *(function_text(f) for f in sources)]
    held = [c for f in sources for c in constants(f)]
    read = 0
    for _ in range(1500):
        text = rng.choice(texts)
        for _ in range(rng.choice((1, 1, 3))):
            at, n = rng.randrange(len(text)), rng.randrange(1, 12)
            other = text[(o := rng.randrange(len(text))) : o + n]
            text = text[:at] + rng.choice((other, "", "(", "%", "\n", "9" * 30)) + text[at + n :]
        start = time.process_time()
        try:
            function_text(parse_function(text, held))
            read += 1
        except InvalidInput:
            pass
        assert time.process_time() - start < 5
    assert read > 0


def test_constants_of_equal_bytes_are_told_apart_by_their_types():
    row, column = np.arange(12.0).reshape(1, 12), np.arange(12.0).reshape(12, 1)
    build = Build(TABLE, "f")
    with build:
        y = build.as_operand(row) + build.as_operand(column)
    text = function_text(build.finish({"y": y}))
    assert function_text(parse_function(text, [row, column])) == text
