"""LongContextJob: what a user writes. Defaults, bounds and rules of ``spec``.

Text under a field becomes its description in the custom resource. Fields that a rule names in CEL
either have a default or are tested with ``has()``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msa_kernels.capabilities import AUTO, NAMES
from msa_kernels.pattern import BlockList, Dense, Pattern
from pydantic import Field

from msa_operator.api import values
from msa_operator.api.fields import Degree, ObjectName, Switch
from msa_operator.api.operations import (
    Capacity,
    Checkpoint,
    Cleanup,
    Deadlines,
    Failure,
    Hang,
    Network,
)
from msa_operator.api.pattern import PatternField
from msa_operator.api.pod import Pod, Queue
from msa_operator.api.schema import (
    Choice,
    Each,
    Int,
    Map,
    Model,
    Number,
    Opaque,
    Rule,
    Text,
)
from msa_operator.api.status import JobStatus
from msa_operator.planner.presets import PRESETS

GROUP = "flashmsa.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class ModelSource(Model):
    source: Annotated[
        str | None,
        Text(1024, values.MODEL_SOURCE, values.MODEL_HELP,
             lambda found: values.nearest_uri(found, ("hf", "file"))),
    ] = None  # fmt: skip
    """Where the config, weights and tokenizer come from: hf://owner/name or file:///folder."""
    preset: Annotated[str | None, Choice(tuple(PRESETS))] = None
    """A model shape that this version knows, trained from random weights."""
    config: Annotated[dict[str, Any] | None, Opaque()] = None
    """A Hugging Face config (config.json's fields), trained from random weights."""
    tokenizer: Annotated[
        str | None,
        Text(1024, r"^(bytes|hf://[^\s]+|file:///[^\s]+)$", "bytes, hf://owner/name or file:///folder",
             lambda found: values.nearest_uri(found, ("hf", "file")) or "bytes"),
    ] = None  # fmt: skip
    """bytes, or where a tokenizer is; the model's own where there is a source, else bytes."""

    rules: ClassVar = (
        Rule(
            "[has(self.source), has(self.preset), has(self.config)].filter(x, x).size() == 1",
            "give exactly one of source, preset and config",
            lambda m: [m.source, m.preset, m.config].count(None) == 2,
            found=lambda m: "found " + (" and ".join(
                n for n in ("source", "preset", "config") if getattr(m, n) is not None) or "none"),
        ),
    )  # fmt: skip


class Data(Model):
    source: Annotated[
        str,
        Text(1024, values.DATA_SOURCE, values.DATA_HELP,
             lambda found: values.nearest_uri(found, ("python-stdlib", "file", "s3")), shortest=1),
    ]  # fmt: skip
    """Training text: python-stdlib://, file:///folder/*.jsonl or s3://bucket/prefix/*.jsonl."""
    text_field: Annotated[str, Text(253, shortest=1)] = "text"
    """Field that holds the text in JSON lines."""
    packing: Switch = True
    """Pack documents into full sequences; tokens never attend across documents."""
    holdout_fraction: Annotated[float, Number(0, 0.5)] = 0.05
    """Share of the documents kept for evaluation, chosen by hash."""


class Sequence(Model):
    length: Annotated[int, Int(16, 1 << 30)]
    """Context length in tokens."""
    global_batch_tokens: Annotated[int | None, Int(16, 1 << 40)] = None
    """Tokens of one optimizer step over all ranks; default: one sequence per data rank."""

    rules: ClassVar = (
        Rule(
            "!has(self.globalBatchTokens) || self.globalBatchTokens % self.length == 0",
            "globalBatchTokens must be a multiple of length",
            lambda s: not s.global_batch_tokens or s.global_batch_tokens % s.length == 0,
            "globalBatchTokens",
            lambda s: f"found {s.global_batch_tokens} with length {s.length}",
            lambda s: str(max(1, round(s.global_batch_tokens / s.length)) * s.length),
        ),
    )


class Attention(Model):
    pattern: Annotated[Pattern, PatternField()] = Dense()
    """Which earlier tokens a token sees; Dense is all of them."""
    dense_layers: Annotated[tuple[int, ...], Each(Int(0, 4095), 4096, unique=True)] = ()
    """Layers, counted from 0, that keep dense attention."""
    backend: Annotated[str, Choice(NAMES)] = AUTO
    """What computes attention: auto is the fastest that serves; others serve or are refused."""


class Training(Model):
    max_steps: Annotated[int, Int(1, 10**9)]
    """Optimizer steps."""
    learning_rate: Annotated[float, Number(0, 10, above=True)] = 2.0e-5
    """Highest learning rate, reached after the warm-up."""
    min_learning_rate_ratio: Annotated[float, Number(0, 1)] = 0.1
    """The cosine schedule ends at this share of learningRate."""
    warmup_steps: Annotated[int | None, Int(0, 10**9)] = None
    """Steps of linear warm-up; default: a twentieth of maxSteps."""
    weight_decay: Annotated[float, Number(0, 1)] = 0.1
    """Of AdamW; norms and biases have none."""
    beta1: Annotated[float, Number(0, 0.999999)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Number(0, 0.999999)] = 0.95
    """Decay of AdamW's second moment."""
    clip_norm: Annotated[float, Number(0, 1e6, above=True)] = 1.0
    """Largest norm of all gradients together; longer ones are scaled down to it."""
    precision: Annotated[Literal["bf16", "fp32"], Choice(("bf16", "fp32"))] = "bf16"
    """Precision of the matrix products; master weights are always fp32."""
    seed: Annotated[int, Int(0, (1 << 31) - 1)] = 0
    """Of the initial weights and of the order of the data."""
    evaluate_every: Annotated[int, Int(0, 10**9)] = 0
    """Steps between evaluations on held-out text; 0 evaluates at the end only."""
    evaluate_sequences: Annotated[int, Int(1, 10**6)] = 16
    """Held-out sequences of an evaluation."""

    rules: ClassVar = (
        Rule(
            "!has(self.warmupSteps) || self.warmupSteps <= self.maxSteps",
            "warmupSteps must be at most maxSteps",
            lambda t: t.warmup_steps is None or t.warmup_steps <= t.max_steps,
            "warmupSteps",
            lambda t: f"found {t.warmup_steps} with maxSteps {t.max_steps}",
            lambda t: str(t.max_steps // 20),
        ),
    )


class Parallelism(Model):
    policy: Annotated[Literal["Auto", "Fixed"], Choice(("Auto", "Fixed"))] = "Auto"
    """Auto chooses the degrees and keeps those that are given; Fixed uses 1 for the others."""
    tensor: Annotated[int | None, Int(1, 1 << 15)] = None
    """Ranks that split the heads and the MLP of each layer."""
    context: Annotated[int | None, Int(1, 1 << 15)] = None
    """Ranks that split each sequence."""
    data_shard: Annotated[int | None, Int(1, 1 << 15)] = None
    """Ranks that read different sequences and share one copy of the weights."""
    data_replicate: Annotated[int | None, Int(1, 1 << 15)] = None
    """Copies of the weights."""

    rules: ClassVar = (
        Rule(
            "self.policy != 'Fixed' || has(self.tensor) || has(self.context) || "
            "has(self.dataShard) || has(self.dataReplicate)",
            "policy Fixed needs at least one of tensor, context, dataShard and dataReplicate",
            lambda p: (
                p.policy != "Fixed" or any((p.tensor, p.context, p.data_shard, p.data_replicate))
            ),
            "policy",
            lambda p: "found Fixed without degrees",
            lambda p: "Auto",
        ),
    )

    @property
    def product(self) -> int:
        """World size of the given degrees, those not given taken as 1."""
        return (
            (self.tensor or 1) * (self.context or 1)
            * (self.data_shard or 1) * (self.data_replicate or 1)
        )  # fmt: skip


class Accelerators(Model):
    min: Degree = 1
    """The fewest with which the run may start."""
    max: Degree = 8
    """The most that it may hold."""

    rules: ClassVar = (
        Rule(
            "self.min <= self.max",
            "min must be at most max",
            lambda a: a.min <= a.max,
            "min",
            lambda a: f"found {a.min} with max {a.max}",
            lambda a: str(a.max),
        ),
    )


class Hardware(Model):
    device: Annotated[Literal["gpu", "cpu"], Choice(("gpu", "cpu"))] = "gpu"
    """cpu is for small runs: workers on this machine or on a Ray cluster."""
    accelerators: Accelerators | None = None
    """How many accelerators the run may use; default: 1 to 8."""
    instance_types: Annotated[
        tuple[str, ...],
        Each(Text(63, r"^[a-z0-9][a-z0-9.-]*$", "a type such as p5.48xlarge", shortest=1),
             32, unique=True),
    ] = ()  # fmt: skip
    """Machine types to choose from, of the catalogue or of HardwareProfiles; default: any."""
    workers: Annotated[int | None, Int(1, 4096)] = None
    """Number of CPU workers, with device cpu."""

    rules: ClassVar = (
        Rule(
            "self.device != 'cpu' || has(self.workers)",
            "device cpu needs workers",
            lambda h: h.device != "cpu" or h.workers is not None,
            "workers",
            lambda h: "is missing",
            lambda h: "2",
        ),
        Rule(
            "self.device != 'cpu' || !has(self.accelerators)",
            "device cpu has workers, not accelerators",
            lambda h: h.device != "cpu" or h.accelerators is None,
            "accelerators",
            lambda h: "found with device cpu",
        ),
        Rule(
            "self.device != 'gpu' || !has(self.workers)",
            "device gpu has accelerators, not workers",
            lambda h: h.device != "gpu" or h.workers is None,
            "workers",
            lambda h: "found with device gpu",
        ),
    )


def _world(spec: Any) -> bool:
    p = spec.parallelism
    if p.policy != "Fixed" or not any((p.tensor, p.context, p.data_shard, p.data_replicate)):
        return True  # nothing is fixed; Parallelism's own rule says so where that is wrong
    product = spec.parallelism.product
    if spec.hardware.device == "cpu":
        return product == spec.hardware.workers
    limits = spec.hardware.accelerators or Accelerators()
    return limits.min <= product <= limits.max


def _degrees(spec: Any) -> str:
    p = spec.parallelism
    names = ("tensor", "context", "data_shard", "data_replicate")
    return " x ".join(str(getattr(p, n) or 1) for n in names)


def _world_found(spec: Any) -> str:
    product = f"degrees {_degrees(spec)} = {spec.parallelism.product} ranks"
    if spec.hardware.device == "cpu":
        return f"found {product} for {spec.hardware.workers} workers"
    limits = spec.hardware.accelerators or Accelerators()
    return f"found {product} for {limits.min} to {limits.max} accelerators"


def _covered(attention: Any, length: int) -> bool:
    pattern = attention.pattern
    return not isinstance(pattern, BlockList) or len(pattern.rows) * pattern.block >= length


_DEGREE = "(has(self.parallelism.{0}) ? self.parallelism.{0} : 1)"
_PRODUCT = " * ".join(
    _DEGREE.format(n) for n in ("tensor", "context", "dataShard", "dataReplicate")
)
_LIMIT = "(has(self.hardware.accelerators) ? self.hardware.accelerators.{0} : {1})"
_IMMUTABLE = ("model", "data", "sequence", "attention")


class JobSpec(Model):
    suspend: Switch = False
    """true plans and spends nothing; a running job writes a checkpoint and stops."""
    model: ModelSource
    data: Data
    sequence: Sequence
    attention: Attention = Field(default_factory=Attention)
    training: Training
    parallelism: Parallelism = Field(default_factory=Parallelism)
    hardware: Hardware = Field(default_factory=Hardware)
    capacity: Capacity = Field(default_factory=Capacity)
    network: Network = Field(default_factory=Network)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    failure: Failure = Field(default_factory=Failure)
    hang: Hang = Field(default_factory=Hang)
    deadlines: Deadlines = Field(default_factory=Deadlines)
    pod: Pod = Field(default_factory=Pod)
    queue: Queue | None = None
    pod_patch: Annotated[dict[str, Any], Opaque()] = Field(default_factory=dict)
    """Merged into the worker pod template; checked by a server-side dry run."""
    cleanup: Cleanup = Field(default_factory=Cleanup)

    rules: ClassVar = (
        Rule(
            "self.parallelism.policy != 'Fixed' || self.hardware.device != 'cpu' || "
            f"!has(self.hardware.workers) || {_PRODUCT} == self.hardware.workers",
            "the degrees' product must equal hardware.workers",
            lambda s: s.hardware.device != "cpu" or s.hardware.workers is None or _world(s),
            "parallelism",
            _world_found,
            lambda s: f"dataShard: {s.hardware.workers} alone",
        ),
        Rule(
            "self.parallelism.policy != 'Fixed' || self.hardware.device != 'gpu' || "
            f"({_PRODUCT} >= {_LIMIT.format('min', 1)} && "
            f"{_PRODUCT} <= {_LIMIT.format('max', 8)})",
            "the degrees' product must lie within hardware.accelerators min and max",
            lambda s: s.hardware.device != "gpu" or _world(s),
            "parallelism",
            _world_found,
        ),
        Rule(
            "self.attention.pattern.type != 'BlockList' || !has(self.attention.pattern.rows) || "
            "!has(self.attention.pattern.block) || size(self.attention.pattern.rows) * "
            "self.attention.pattern.block >= self.sequence.length",
            "a BlockList needs a row for every block of sequence.length",
            lambda s: _covered(s.attention, s.sequence.length),
            "attention.pattern.rows",
            lambda s: (
                f"found {len(s.attention.pattern.rows)} rows of {s.attention.pattern.block} "
                f"tokens for length {s.sequence.length}"
            ),
            lambda s: f"{-(-s.sequence.length // s.attention.pattern.block)} rows",
        ),
        *(
            Rule(
                f"self.{name} == oldSelf.{name}",
                f"{name} cannot change: checkpoints of the old one would not fit; make a new job",
                None,
                name,
            )
            for name in _IMMUTABLE
        ),
    )


class Metadata(Model):
    """The fields of an object's metadata that are read; a cluster adds others."""

    model_config = Model.model_config | {"extra": "allow"}

    name: Annotated[
        str,
        Text(values.JOB_NAME_LENGTH, values.NAME,
             "lower case letters, digits and '-', a letter first and no '-' last: services and a "
             "Ray cluster are named after the job, and KubeRay allows 53 characters for "
             "<job>-<uid>-<hash>",
             values.nearest_name, shortest=1),
    ]  # fmt: skip
    namespace: ObjectName | None = None
    labels: Annotated[dict[str, str], Map(256, 63)] = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], Map(256, 262_144)] = Field(default_factory=dict)


class LongContextJob(Model):
    api_version: Annotated[str, Choice((API_VERSION,))]
    kind: Annotated[str, Choice(("LongContextJob",))]
    metadata: Metadata
    spec: JobSpec
    status: JobStatus | None = None

    rules: ClassVar = (
        Rule(
            f"size(self.metadata.name) <= {values.JOB_NAME_LENGTH}",
            f"metadata.name may have {values.JOB_NAME_LENGTH} characters: the Ray cluster is "
            "named <job>-<uid>-<hash> and KubeRay allows 53",
            None,
        ),
        Rule(
            f"self.metadata.name.matches('{values.NAME}')",
            "metadata.name: lower case letters, digits and '-', a letter first and no '-' last",
            None,
        ),
    )
