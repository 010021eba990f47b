"""Parts of self-contained pages. Text enters a page through `html.escape`, data packed, and scripts by their hashes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import re
from typing import Any


def hashed(script: str) -> str:
    """What a content policy calls a script that it lets run."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def packed(data: Any) -> str:
    """Data as gzipped JSON in letters, which end no element they stand in; the same for the same data."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def as_json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def part(name: str) -> str:
    """A file that lies beside this one."""
    return importlib.resources.files("patchclamp.plots").joinpath(name).read_text(encoding="utf-8")


def filled(template: str, parts: dict[str, str]) -> str:
    """A template with every `@@name@@` in it replaced, once."""
    return re.sub(r"@@(\w+)@@", lambda name: parts[name[1]], template)
