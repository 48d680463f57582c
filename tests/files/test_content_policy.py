"""The policy of pages: their own scripts and styles by hash, and nothing else."""

from triplane.unified_ir.files.content_policy import content_policy

# The example of the W3C's recommendation.
HELLO = "alert('Hello, world.');"
HASH = "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='"
EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
CLOSED = "base-uri 'none'; form-action 'none'"


def test_a_page_may_run_its_own_scripts_and_styles_and_nothing_else():
    page = f"<style></style><script>{HELLO}</script><p>text</p><script></script>"
    assert content_policy(page) == (
        f"default-src 'none'; script-src {HASH} {EMPTY}; style-src {EMPTY}; {CLOSED}"
    )


def test_data_blocks_and_scripts_of_other_files_are_not_allowed():
    page = f'<script type="application/json">{HELLO}</script><script src="a.js"></script>'
    assert content_policy(page) == f"default-src 'none'; {CLOSED}"


def test_a_script_of_several_lines_is_hashed_whole():
    first, second = (content_policy(f"<script>\nlet a;\n{end}\n</script>") for end in "ab")
    assert "script-src 'sha256-" in first
    assert first != second


def test_further_directives_keep_the_rest_closed():
    policy = content_policy(f"<script>{HELLO}</script>", "img-src data:", "connect-src 'self'")
    assert policy == (
        f"default-src 'none'; script-src {HASH}; img-src data:; connect-src 'self'; {CLOSED}"
    )
