"""RunSpec: everything one run is told, as frozen dataclasses that travel as JSON.

The planner writes it, every door (``msa run``, ``ray job submit``, ``torchrun``, the operator)
hands it over unchanged, and the training entry point reads nothing else. It imports only the
standard library, so the control plane can build one without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = 1


class RunSpecError(ValueError):
    """A RunSpec document does not fit the schema; the message starts with the path."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model to train.

    ``config`` is a Hugging Face model config as a mapping (``model_type`` included); ``source``
    is where weights and tokenizer come from, or None for random weights.
    """

    config: dict[str, Any]
    source: str | None = None
    tokenizer: str = "bytes"


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Training text: a ``python-stdlib://``, ``file://`` or ``s3://`` address."""

    source: str
    text_field: str = "text"
    packing: bool = True
    holdout_fraction: float = 0.05


@dataclass(frozen=True, kw_only=True)
class SequenceSpec:
    """How tokens are grouped.

    ``length`` is the context length in tokens; one optimizer step sees
    ``length * micro_batch * accumulation`` tokens on each data rank.
    """

    length: int
    micro_batch: int = 1
    accumulation: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """``pattern`` is :meth:`msa_kernels.pattern.Pattern.to_dict`; ``dense_layers`` keep Dense;
    ``backend``, one of :data:`msa_kernels.capabilities.NAMES`, computes all layers."""

    pattern: dict[str, Any]
    dense_layers: tuple[int, ...] = ()
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    max_steps: int
    learning_rate: float = 3.0e-4
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0
    evaluate_every: int = 0
    evaluate_sequences: int = 16


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Degrees of parallelism; the world size is their product."""

    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data_replicate * self.data_shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.data_replicate * self.data_shard


@dataclass(frozen=True, kw_only=True)
class ContextSpec:
    """How the ``mesh.context`` ranks share a sequence; without effect where that is 1.

    Every choice gives the same result up to rounding.
    """

    layout: Literal["auto", "contiguous", "rotated", "zigzag", "residues", "balanced"] = "auto"
    """Which rank owns which tokens; ``auto`` prices all of them on the run's own documents."""
    method: Literal["all_to_all", "p2p", "ring"] = "all_to_all"
    """How keys and values travel: all at once, or one rank's at a time (ring, least memory)."""
    heads: int = 1
    """Ranks that share the heads of a part of the sequence instead of its tokens (Ulysses). The
    other factor of ``mesh.context`` exchanges keys and values."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients of keys and values return to their owners."""


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Switches that trade time for memory; the planner sets them. See docs/memory.md."""

    checkpointing: Literal["none", "selective", "full"] = "none"
    """What of a layer is computed again in backward: nothing, all but attention, all."""
    keep_projections: int = 0
    """Of how many layers, the last ones, ``selective`` keeps the products around attention too."""
    checkpoint_layers: int = 1
    """Layers for each input that is kept; those between are run once more in backward."""
    offload_checkpoints: bool = False
    """Whether the inputs that are kept wait in host memory."""
    checkpoints_on_device: int = 0
    """How many of them stay on the device nevertheless: the last ones."""
    offload_optimizer: bool = False
    """Whether optimizer states live in host memory between steps."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """dtype of optimizer states between steps."""
    parameters: Literal["fp32", "bf16"] = "fp32"
    """dtype of weights between steps; bf16 keeps no fp32 master copy."""
    loss_chunk: int = 0
    """Tokens per chunk of the linear cross-entropy; 0 computes all logits at once."""
    loss_kernel: Literal["auto", "torch", "liger"] = "auto"
    """Who computes the chunks: this package's kernel on GPUs and torch elsewhere, torch, or Liger
    (GPUs; it picks its own chunk)."""
    mlp_chunk: int = 0
    """Tokens per tile of the MLP; 0 runs it whole."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    uri: str
    every_steps: int = 100
    keep: int = 3
    resume: Literal["Latest", "Never"] = "Latest"


@dataclass(frozen=True, kw_only=True)
class RecoverySpec:
    """Who restarts a failed attempt: exactly one owner, never two."""

    owner: Literal["ray", "operator", "none"] = "none"
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    name: str
    model: ModelSpec
    data: DataSpec
    sequence: SequenceSpec
    attention: AttentionSpec
    training: TrainingSpec
    checkpoint: CheckpointSpec
    output: str
    """Folder for summary.json, report.html and metrics.jsonl."""
    device: Literal["cpu", "gpu"] = "cpu"
    threads: int = 0
    """CPU threads per worker; 0 leaves torch's own choice."""
    mesh: MeshSpec = field(default_factory=MeshSpec)
    context: ContextSpec = field(default_factory=ContextSpec)
    memory: MemorySpec = field(default_factory=MemorySpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan as the planner explained it, carried for the report only."""
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read a spec back; raises :class:`RunSpecError` on anything the schema does not know."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise RunSpecError(f"not JSON: {error}") from None
        if isinstance(raw, dict) and raw.get("version") != VERSION:
            raise RunSpecError(
                f"version: found {raw.get('version')!r}, this program reads {VERSION}"
            )
        return _build(cls, raw, "")


LIMITS: dict[str, tuple[float, float]] = {
    "sequence.length": (1, math.inf),
    "sequence.micro_batch": (1, math.inf),
    "sequence.accumulation": (1, math.inf),
    "data.holdout_fraction": (0, 1),
    "training.max_steps": (0, math.inf),
    "training.learning_rate": (0, math.inf),
    "training.min_learning_rate_ratio": (0, 1),
    "training.warmup_steps": (0, math.inf),
    "training.weight_decay": (0, math.inf),
    "training.beta1": (0, 1),
    "training.beta2": (0, 1),
    "training.clip_norm": (0, math.inf),
    "training.evaluate_every": (0, math.inf),
    "training.evaluate_sequences": (0, math.inf),
    "checkpoint.every_steps": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
    "recovery.max_restarts": (0, math.inf),
    "threads": (0, math.inf),
    **dict.fromkeys(
        (f"mesh.{axis}" for axis in ("data_replicate", "data_shard", "context", "tensor")),
        (1, math.inf),
    ),
}
"""Least and greatest value of numbers, by path. A step of no micro-batches, for one, would train
on nothing and say that it is done."""


def check_values(spec: RunSpec) -> None:
    """Raise :class:`RunSpecError` for a number that means nothing; NaN is in no range."""
    for path, (least, greatest) in LIMITS.items():
        found: Any = functools.reduce(getattr, path.split("."), spec)
        if not (least <= found <= greatest and math.isfinite(found)):
            most = f" and at most {greatest:g}" if greatest < math.inf else ""
            raise RunSpecError(f"{path}: found {found}, must be at least {least:g}{most}")


def _build(kind: type, raw: object, path: str) -> Any:
    where = path or "(top)"
    if not isinstance(raw, dict):
        raise RunSpecError(f"{where}: expected an object, found {type(raw).__name__}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        raise RunSpecError(f"{where}: unknown field {unknown[0]!r}; known: {sorted(fields)}")
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _value(hints[name], raw[name], f"{path}.{name}".lstrip("."))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RunSpecError(f"{where}: field {name!r} is missing")
    return kind(**values)


def _value(hint: Any, raw: object, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        if raw is None:
            return None
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _value(hint, raw, path)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), raw, path)
    if origin is Literal:
        if raw not in typing.get_args(hint):
            raise RunSpecError(
                f"{path}: found {raw!r}, allowed: {', '.join(map(str, typing.get_args(hint)))}"
            )
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise RunSpecError(f"{path}: expected a list, found {type(raw).__name__}")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, r, f"{path}[{n}]") for n, r in enumerate(raw))
    if origin is dict:
        hint = dict
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(raw, hint) or (isinstance(raw, bool) and hint is not bool):
        raise RunSpecError(f"{path}: expected {hint.__name__}, found {raw!r}")
    return raw
