"""Values that are written as text: durations, quantities, addresses, names.

Each kind has the regular expression that the custom resource's schema carries too, a function
that reads it, and one that finds what a near miss most likely meant. Expressions are kept to what
Go's RE2 and Python read alike.
"""

from __future__ import annotations

import os
import re

DURATION = r"^(0s|([1-9][0-9]{0,5}d)?([1-9][0-9]{0,5}h)?([1-9][0-9]{0,5}m)?([1-9][0-9]{0,5}s)?)$"
DURATION_HELP = "a duration such as 90s, 30m, 1h30m or 7d"
QUANTITY = r"^[0-9]{1,12}(\.[0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
QUANTITY_HELP = "a quantity such as 500m, 8, 64Gi or 1900000Mi"
DATA_SOURCE = r"^(python-stdlib://|file:///[^\s]+|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\s]+)$"
DATA_HELP = "python-stdlib://, file:///folder/*.jsonl or s3://bucket/prefix/*.jsonl"
MODEL_SOURCE = r"^(hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+|file:///[^\s]+)$"
MODEL_HELP = "hf://owner/name or file:///folder (holding config.json)"
FOLDER = r"^(file:///[^\s]+|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?)$"
FOLDER_HELP = "file:///folder or s3://bucket/prefix"
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

JOB_NAME_LENGTH = 38
"""A cluster is named ``<job>-<uid5>-<hash8>`` and KubeRay allows 53 characters for it."""

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SCALES = {
    "": 1, "m": 1e-3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
}  # fmt: skip


def seconds(duration: str) -> int:
    """Seconds of ``1h30m``. Raises :class:`ValueError` when it is not a duration."""
    if not duration or not re.fullmatch(DURATION, duration):
        raise ValueError(f"{duration!r} is not {DURATION_HELP}")
    return sum(int(n) * _SECONDS[unit] for n, unit in re.findall(r"([0-9]+)([dhms])", duration))


def duration(total: int) -> str:
    """Whole seconds as the shortest duration text; 0 is ``0s``."""
    text = ""
    for unit, size in _SECONDS.items():
        count, total = divmod(total, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def nearest_duration(found: object) -> str:
    """What a near miss meant: ``30 m``, ``30mins``, ``1.5h``, ``90`` (seconds), ``2 weeks``."""
    if isinstance(found, int | float) and not isinstance(found, bool):
        return duration(round(found)) if 0 <= found < 1e6 else ""
    if not isinstance(found, str):
        return ""
    units = {"w": 604_800, **_SECONDS}
    total = 0.0
    rest = found.strip().lower()
    while rest:
        match = re.match(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*(?:,|and)?\s*", rest)
        if match is None:
            return ""
        number, unit = match.groups()
        word = unit or "s"
        if word.startswith(("ms", "mil", "mo")) or word[0] not in units:
            return ""
        total += float(number) * units[word[0]]
        rest = rest[match.end() :]
    return duration(round(total)) if 0 < total < 1e10 else ""


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: ``64Gi`` is 68719476736.

    Raises :class:`ValueError` when it is not one.
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    if not re.fullmatch(QUANTITY, text) or match is None:
        raise ValueError(f"{text!r} is not {QUANTITY_HELP}")
    return float(match[1]) * _SCALES[match[2]]


def nearest_quantity(found: object) -> str:
    """What a near miss meant: ``64 GB``, ``64gib``, ``64GiB``, a bare number."""
    if isinstance(found, int | float) and not isinstance(found, bool):
        return f"{found:g}" if found >= 0 else ""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(found))
    if match is None:
        return ""
    number, unit = match[1], match[2].lower().removesuffix("b")
    names = {name.lower(): name for name in _SCALES if name != "m"}
    return f"{number}{names[unit]}" if unit in names else ""


def nearest_uri(found: object, schemes: tuple[str, ...]) -> str:
    """What a near miss meant: one slash too few, capitals, a plain path."""
    if not isinstance(found, str) or not found.strip():
        return ""
    text = found.strip()
    match = re.match(r"([A-Za-z][A-Za-z0-9+-]*):/{0,3}(.*)", text)
    if match is None:
        if "hf" in schemes and re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", text):
            return f"hf://{text}"
        return f"file://{os.path.abspath(text)}" if "file" in schemes and "/" in text else ""
    scheme, rest = match[1].lower(), match[2]
    if scheme in ("s3a", "s3n"):
        scheme = "s3"
    if scheme in ("huggingface", "hub"):
        scheme = "hf"
    if scheme not in schemes:
        return ""
    if scheme == "python-stdlib":
        return "python-stdlib://"
    if scheme == "file":
        # file://data is relative; file:/data and file:///data are not.
        rooted = text[match.start(2) - 1] == "/" and not re.match(r"[A-Za-z]+://[^/]", text)
        return f"file://{'/' + rest if rooted else os.path.abspath(rest)}" if rest else ""
    if scheme == "s3" and "/" not in rest.strip("/"):
        rest = f"{rest.strip('/')}/*"
    return f"{scheme}://{rest}" if rest.strip("/") else ""


def nearest_name(found: object, length: int = JOB_NAME_LENGTH) -> str:
    """A valid name made of the given one: lower case, hyphens, cut to ``length``."""
    text = re.sub(r"[^a-z0-9]+", "-", str(found).lower()).lstrip("-0123456789")
    return text[:length].rstrip("-")
