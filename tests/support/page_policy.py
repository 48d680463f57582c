"""What the content security policy of a finished page allows."""

import base64
import hashlib
import re


def check_policy(page: str, policy: str) -> None:
    """Check that the page's only script and style may run, by their hashes, and nothing else."""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'; " in policy


def policy_of(page: str) -> str:
    """Return the policy that the page states itself."""
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    return str(policy)
