"""From ``spec.model`` to a Hugging Face config, without importing any model code.

A preset and an inline config are at hand; a folder is read; a Hub model's config comes from the
local Hub cache, or from the Hub itself where it can be reached. Weights are never fetched here.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msa_operator.api.job import ModelSource
from msa_operator.api.problems import JobError, Problem, closest
from msa_operator.planner.modelspec import ModelError, ModelShape, model_shape
from msa_operator.planner.presets import PRESETS

HUB_SECONDS = 5
"""Wait for the Hub's answer: one small file; a machine without internet should learn it fast."""

CONFIG_BYTES = 1 << 20
"""Largest config.json read."""

BYTE_VOCABULARY = 260
"""What the byte tokenizer needs: 256 bytes, begin, end, padding and one spare."""


@dataclass(frozen=True)
class Model:
    """A model as planner and workers need it. ``source`` is None for random weights."""

    config: dict[str, Any]
    shape: ModelShape
    source: str | None
    tokenizer: str
    label: str


def resolve(model: ModelSource) -> Model:
    """The model of a job. Raises :class:`JobError` when its config cannot be had or used."""
    if model.preset is not None:
        config, field, label = dict(PRESETS[model.preset]), "preset", model.preset
    elif model.config is not None:
        config, field, label = dict(model.config), "config", "inline config"
    else:
        assert model.source is not None
        config, field, label = _from_source(model.source), "source", model.source
    try:
        shape = model_shape(config)
    except ModelError as error:
        at = f"spec.model.{field}"
        if field == "config":
            raise _problem(f"{at}.{error.field}", error.problem) from None
        raise _problem(at, f"{label} has {error}") from None
    source = None if model.source is None else _plain(model.source)
    tokenizer = _plain(model.tokenizer) if model.tokenizer else source or "bytes"
    if tokenizer == "bytes" and shape.vocabulary < BYTE_VOCABULARY:
        raise _problem(
            f"spec.model.{field}.vocab_size" if field == "config" else f"spec.model.{field}",
            f"found vocab_size {shape.vocabulary}",
            f"at least {BYTE_VOCABULARY} with byte tokens", str(BYTE_VOCABULARY),
        )  # fmt: skip
    return Model(config, shape, source, tokenizer, label)


def _plain(address: str) -> str:
    """The path of a ``file://`` address, whose spaces are written ``%20``; others as they are."""
    path = address.removeprefix("file://")
    return path if path == address else unquote(path)


def _problem(path: str, found: str, allowed: str = "", nearest: str = "") -> JobError:
    return JobError([Problem(path, found, allowed, nearest)])


def _from_source(source: str) -> dict[str, Any]:
    if source.startswith("file://"):
        path = Path(_plain(source)) / "config.json"
        try:
            return _parse(path.read_bytes(), source)
        except OSError as error:
            raise _problem(
                "spec.model.source", f"{path} cannot be read: {error.strerror}",
                "a folder that holds config.json",
            ) from None  # fmt: skip
    name = source.removeprefix("hf://")
    cached = cached_config(name)
    if cached is not None:
        return _parse(cached.read_bytes(), source)
    return _parse(_download(name, source), source)


def cached_config(name: str) -> Path | None:
    """config.json of ``owner/name`` in the local Hub cache, if it is there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    path = folder / "snapshots" / revision / "config.json"
    return path if path.is_file() else None


def _download(name: str, source: str) -> bytes:
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    near = closest(name.split("/")[-1], PRESETS)
    nearest = f"model: {{preset: {near}}}" if near else ""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        reason = "HF_HUB_OFFLINE is set"
    elif not hub.startswith(("https://", "http://")):
        reason = f"HF_ENDPOINT is {hub!r}, not an http address"
    else:
        try:
            url = f"{hub}/{name}/resolve/main/config.json"
            with urllib.request.urlopen(url, timeout=HUB_SECONDS) as answer:
                return answer.read(CONFIG_BYTES)
        except urllib.error.HTTPError as error:
            reason = f"{hub} answered {error.code}"
            if error.code in (401, 403):
                reason += ", so it may be gated: fetch it once with the hub's own tool"
        except OSError as error:
            reason = f"{hub} cannot be reached ({getattr(error, 'reason', error)})"
    raise _problem(
        "spec.model.source",
        f"{source} is not in the local Hub cache and {reason}",
        "a model in the cache, file:///folder, a preset, or an inline config",
        nearest,
    )


def _parse(raw: bytes, source: str) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise _problem("spec.model.source", f"config.json of {source}: {error}", "JSON") from None
    if not isinstance(config, dict):
        raise _problem("spec.model.source", f"config.json of {source}", "a JSON object")
    return config
