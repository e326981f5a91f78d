"""How the packages that training needs are added to this installation: from where it came."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import unquote

DISTRIBUTION = "flash-msa-operator"
EXTRA = f"{DISTRIBUTION}[train]"


def command(origin: str | None = None) -> str:
    """A pip command for the extra; ``origin`` is the distribution's ``direct_url.json`` (PEP 610),
    by default that of this installation, or None where it came from a package index."""
    if origin is None:
        try:
            origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        except metadata.PackageNotFoundError:
            origin = None
    try:
        came = json.loads(origin or "{}")
        url = came.get("url", "")
    except (ValueError, AttributeError):
        came, url = {}, ""
    if came.get("dir_info", {}).get("editable"):
        return f'pip install --editable "{unquote(url.removeprefix("file://"))}[train]"'
    if vcs := came.get("vcs_info"):
        url = f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', 'HEAD')}"
    return f'pip install "{EXTRA} @ {url}"' if url else f'pip install "{EXTRA}"'
