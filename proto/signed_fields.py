"""Names of signing roles, and the checks that all content of signed metadata has in common."""

import json
import re
from typing import Any, Final

from triplane.proto.errors import InvalidInput

NAME: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
RELEASE: Final = "release"
PLANS: Final = "plans"
AUTO: Final = "auto"

_HEX: Final = re.compile(r"[0-9a-f]{64}")


def is_hex_digest(x: Any) -> bool:
    """Return whether `x` is the text of a SHA-256, 64 hexadecimal digits in lower case."""
    return isinstance(x, str) and _HEX.fullmatch(x) is not None


def is_count(x: Any, least: int, most: int) -> bool:
    """Return whether `x` is an integer from `least` to `most`."""
    # Not isinstance: `true` in JSON is a bool, which Python counts as an int.
    return type(x) is int and least <= x <= most


def shown(x: Any) -> str:
    """Return a value from outside for a message."""
    return repr(x)[:200]


def parse_policy(text: str, what: str, *, max_bytes: int, max_models: int) -> dict[str, Any]:
    """Return the fields by model of a policy of format 1. InvalidInput; `what` names the policy."""
    if len(text.encode(errors="replace")) > max_bytes:
        raise InvalidInput(f"{what} is at most {max_bytes} bytes of JSON")
    try:
        # JSON parsers differ in which of two equal keys they take, so equal keys are refused.
        document = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what} is a JSON object: {error}") from error
    if not isinstance(document, dict) or set(document) != {"format", "models"}:
        raise InvalidInput(f'{what} is {{"format": 1, "models": {{NAME: RULE, ...}}}}')
    if type(document["format"]) is not int or document["format"] != 1:
        raise InvalidInput(f"{what} has format 1, got {shown(document['format'])}")
    models = document["models"]
    if not isinstance(models, dict) or len(models) > max_models:
        raise InvalidInput(f"{what} has at most {max_models} models, by name")
    for model in models:
        if not re.fullmatch(NAME, model):
            raise InvalidInput(f"{what}: a model's name matches {NAME}, got {shown(model)}")
    return models


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a key is repeated in {sorted(key for key, _ in pairs)}")
    return fields
