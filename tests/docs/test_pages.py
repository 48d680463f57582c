"""Every page of the documentation runs whole, in order, from an empty folder."""

import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.support import pages
from tests.support.pages import ROOT, Block, blocks_of, outputs_of, run_page

PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "extending" not in page.parts  # test_extending.py follows those
}
LONG = {
    "docs/converting.md",
    "docs/deploying.md",
    "docs/devices.md",
    "docs/engines.md",
    "docs/federated.md",
    "docs/importing.md",
    "docs/many_hosts.md",
    "docs/operations.md",
    "docs/parallel.md",
    "docs/privacy.md",
    "docs/training.md",
    "docs/tutorials/photos.md",
    "docs/tutorials/series.md",
    "docs/tutorials/text.md",
}
"""Pages of whole processes, of longer training or of many engines: `make long` runs them."""

NOT_RUN = {
    ("README.md", "sets up a checkout"): 1,
    ("README.md", "installs packages"): 1,
    ("docs/benchmarks.md", "minutes of measurement"): 8,
    ("docs/deploying.md", "installs packages"): 1,
    ("docs/engines.md", "installs packages"): 1,
    ("docs/federated.md", "installs packages"): 1,
    ("docs/many_hosts.md", "needs a cluster"): 1,
    ("docs/operations.md", "installs packages"): 1,
    ("docs/operations.md", "needs systemd and root"): 1,
    ("docs/serving.md", "installs packages"): 1,
}
"""How many blocks of a page do not run, by the reason that stands above them."""

FENCED = re.compile(r"^```(?:python|sh)\n.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?: {4,}|\$ )(?:\w+=\S+ )?(?:\S+/)?(?:triplane|pip|python|make|git|ssh|curl) \S.*",
    re.MULTILINE,
)

SHARED = """
```sh
sleep 1000 &
x=1
```
```python
y = 2
```
<!-- not run: it fails -->
```sh
false
```
```sh
kill -0 %1
echo $x > x
```
```python
assert (open("x").read(), y) == ("1\\n", 2)
```
"""


def cases():
    """Return a case for each page that has a block to run."""
    return [
        pytest.param(page, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, page in PAGES.items()
        if any(block.runs() for block in blocks_of(page))
    ]


@pytest.fixture
def short_path():
    """A node's socket lies below its folder, and Linux limits the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", cases())
def test_a_page_runs_whole_from_an_empty_folder(page, short_path):
    output = run_page(page, short_path)
    assert [text for text in outputs_of(page) if text not in output] == []


def test_the_blocks_that_do_not_run_are_these():
    reasons = Counter(
        (name, block.reason)
        for name, page in PAGES.items()
        for block in blocks_of(page)
        if block.reason
    )
    assert reasons == NOT_RUN


def test_ci_runs_the_blocks_that_need_an_extra_where_it_is_installed():
    extras = {
        (name, block.extra)
        for name, page in PAGES.items()
        for block in blocks_of(page)
        if block.extra
    }
    assert extras == {("docs/federated.md", "flower")}
    lines = (ROOT / ".ci" / "run").read_text().replace("\\\n", "").splitlines()
    for name, extra in extras:
        assert any(f".venv-{extra}/bin/" in line and f"[{name}]" in line for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_a_command_stands_in_a_block_that_runs(name):
    assert COMMAND.findall(FENCED.sub("", PAGES[name].read_text())) == []


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md"])
def test_each_target_of_make_that_a_page_names_exists(name):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / name).read_text(), re.MULTILINE))
    assert named <= targets


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```sh\nfalse\ntrue\n```\n", "a command failed with 1"),
        ("```python\nprint(undefined)\n```\n", "name 'undefined' is not defined"),
        ("```sh\nx=1\n```\n\n```sh\ntest $x = 2\n```\n", "a command failed with 1"),
    ],
)
def test_a_page_with_a_fault_fails(text, reason, tmp_path):
    with pytest.raises(AssertionError, match=reason):
        run_page(page_of(tmp_path, text), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", [pages.SANDBOX, ("false",)])
def test_blocks_share_a_shell_and_a_folder_and_what_they_start_ends(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "SANDBOX", sandbox)
    run_page(page_of(tmp_path, SHARED), tmp_path)
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["x"]


@pytest.mark.slow
def test_a_page_that_waits_without_end_fails_with_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "LIMIT_S", 1.0)
    text = "```sh\necho begun\nuntil false; do sleep 0.1; done\n```\n"
    with pytest.raises(AssertionError, match="begun\nthe page did not end within 1 s"):
        run_page(page_of(tmp_path, text), tmp_path)


def test_a_reason_belongs_to_the_block_below_it(tmp_path):
    text = "<!-- not run: a -->\n\n```sh\na\n```\n<!-- not run: b -->\n```python\nb\n```\n"
    page = page_of(tmp_path, text)
    assert blocks_of(page) == [Block("sh", "a\n", ""), Block("python", "b\n", "b")]
