"""Train one run: the loop behind every door.

    python -m msa_workloads.train --spec runspec.json
    torchrun --nproc-per-node 2 -m msa_workloads.train --spec runspec.json

Ray workers call :func:`run` directly (see :mod:`msa_workloads.launch`). A run that finds a whole
checkpoint under ``checkpoint.uri`` continues from it unless the spec says ``resume: Never``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msa_workloads.checkpoint import Checkpointer, CheckpointError, Marker
from msa_workloads.context.account import timed
from msa_workloads.context.home import Packing
from msa_workloads.context.run import context_split
from msa_workloads.corpus import Corpus, Index, build_index, differing, split
from msa_workloads.data import EVALUATION_SEED, Loader, Prefetcher, StepData, Stream
from msa_workloads.display import heads_line
from msa_workloads.evaluate import HeldOut, evaluate, move, order1_bits_per_byte
from msa_workloads.heads import report_heads
from msa_workloads.loss import divisor
from msa_workloads.memory import peak_memory_bytes
from msa_workloads.model import LanguageModel, build_model, effective_patterns
from msa_workloads.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from msa_workloads.parallel.collective import meet, on_all_ranks, on_rank_zero, sum_over_ranks
from msa_workloads.parallel.fsdp import accumulate
from msa_workloads.parallel.mesh import Mesh, World, build_mesh, check_supported, join_world
from msa_workloads.parallel.watch import Watch
from msa_workloads.progress import ALONE, Control, Sink, StepRow
from msa_workloads.runspec import RunSpec
from msa_workloads.sources import DataError, open_source
from msa_workloads.storage import open_store
from msa_workloads.tokens import open_tokenizer

log = logging.getLogger(__name__)

DIGEST_BITS = (1 << 62) - 1
"""Digests are sums over ranks; this many bits of them fit JSON's signed 64-bit readers."""


class DivergedError(RuntimeError):
    """Loss or gradients stopped being finite; going on would only destroy the weights."""


@dataclass(frozen=True)
class Data:
    """The run's text, indexed and split."""

    corpus: Corpus
    training: Stream
    training_documents: Any
    held_out: HeldOut | None


def run(spec: RunSpec, sink: Sink, control: Control = ALONE) -> dict[str, Any]:
    """Train, checkpoint and evaluate; returns the outcome, the same on every rank.

    ``sink`` is used on rank 0 only. When any rank's ``control`` asks to stop, all ranks stop
    before the same step, after a checkpoint, and the outcome is ``drained``.

    Raises :class:`~msa_workloads.parallel.mesh.UnsupportedError` for what this release cannot do,
    :class:`~msa_workloads.sources.DataError` for unreadable data,
    :class:`~msa_workloads.checkpoint.CheckpointError`, and :class:`DivergedError`.
    """
    check_supported(spec)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    # On CPUs every operation used here has a deterministic form. On GPUs atomics in library
    # kernels do not, and refusing them would refuse the run.
    torch.use_deterministic_algorithms(spec.device == "cpu")
    world = join_world(spec.device)
    with Watch():
        return _run(spec, sink, control, world)


def _run(spec: RunSpec, sink: Sink, control: Control, world: World) -> dict[str, Any]:
    started = time.time()
    mesh = build_mesh(spec.mesh, world, heads=spec.context.heads)
    torch.manual_seed(mesh.own_seed(spec.training.seed))

    data = open_data(spec)
    # FSDP also keeps fp32 master weights beside bf16 compute, or adds up the gradients of bf16
    # weights in fp32, so bf16 uses it on one rank too.
    narrow = spec.memory.parameters == "bf16"
    wide = spec.training.precision == "bf16" and (not narrow or spec.sequence.accumulation > 1)
    sharded = world.size > 1 or wide
    vocabulary = data.corpus.tokenizer.vocabulary
    content = data.corpus.index.content
    checkpoints = Checkpointer(open_store(spec.checkpoint.uri), spec)
    checkpoints.check_shared()
    marker = _resume_from(spec, checkpoints, content["sha256"])
    model = build_model(
        spec, vocabulary, mesh if sharded else None, world.device,
        orders=marker.orders if marker else None,
    )  # fmt: skip
    meet()  # each machine fetches the weights of a source by itself
    optimizer = build_optimizer(model, spec.training, spec.memory)
    layers = effective_patterns(spec, model)
    split, account = context_split(
        spec, layers, model.heads, data.training, mesh, orders=model.head_orders
    )
    shares = spec.context.heads if spec.mesh.context > 1 else 1
    heads = report_heads(
        layers, model.heads, model.head_orders, spec.mesh.tensor, shares, spec.sequence.length
    )
    loader = Loader(
        data.training, mesh.data_rank, mesh.data_ranks, spec.sequence.micro_batch,
        spec.sequence.accumulation, split,
    )  # fmt: skip
    history = checkpoints.load(marker, model, optimizer) if marker else []
    step, next_sample = (marker.step, marker.next_sample) if marker else (0, 0)
    if world.rank == 0:
        sink.begin(history, spec.plan)
        log.info("start at step %d, sample %d of %s", step, next_sample, content)
        for kind in heads:
            log.info("heads: %s", heads_line(kind))

    first_step = step
    saved_step = step if marker else -1
    elapsed = history[-1]["elapsed"] if history else 0.0
    drained = False
    packings: list[Packing] = []

    def save() -> int:
        control.enters(step, "saving a checkpoint")
        checkpoints.save(
            model, optimizer, step=step, next_sample=next_sample,
            content_sha256=content["sha256"], history=history,
        )  # fmt: skip
        control.saved(step)
        log.info("checkpoint of step %d committed", step)
        return step

    with Prefetcher(loader, next_sample) as steps:
        while step < spec.training.max_steps:
            begun = time.perf_counter()
            control.enters(step + 1, "reading data")
            read = steps.next()
            # The wish to stop travels with a sum that every step needs anyway, so that no rank
            # stops at another step than its peers.
            valid, digest, stop = sum_over_ranks(
                read.valid if mesh.owns_tokens else 0,
                read.digest if mesh.owns_samples else 0,
                int(control.stop_requested()),
                device=world.device,
            )
            if stop:
                drained = True
                break
            step += 1
            control.enters(step, "training")
            rate = learning_rate(step, spec.training)
            set_learning_rate(optimizer, rate)
            with timed(step - first_step):
                loss = train_step(model, read, int(valid), mesh)
            norm = clip_gradients(model, spec.training.clip_norm)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise DivergedError(
                    f"step {step}: loss {loss}, gradient norm {norm} (samples {next_sample} to "
                    f"{next_sample + loader.per_step - 1}); a lower learning rate or a longer "
                    "warm-up is the usual cure"
                )
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - begun
            elapsed += seconds
            row = StepRow(
                step=step,
                loss=loss,
                learning_rate=rate,
                grad_norm=norm,
                tokens=int(valid),
                tokens_per_second=loader.per_step * spec.sequence.length / seconds,
                seconds=seconds,
                elapsed=elapsed,
                memory_bytes=peak_memory_bytes(world.device),
                samples=(next_sample, next_sample + loader.per_step),
                digest=int(digest) & DIGEST_BITS,
                time=time.time(),
            ).to_dict()
            next_sample += loader.per_step
            packings = list(read.packings)
            if data.held_out and _due(step, spec.training.evaluate_every):
                control.enters(step, "evaluating")
                row["held_out"] = evaluate(model, data.held_out, mesh, split)
            history.append(row)
            if world.rank == 0:
                sink.add(row)
            if _due(step, spec.checkpoint.every_steps) or step == spec.training.max_steps:
                saved_step = save()

    if drained and step > max(0, saved_step):
        # Before the first step there is nothing that a new start would not make again.
        saved_step = save()
    control.enters(step, "evaluating")
    held_out = (
        evaluate(model, data.held_out, mesh, split) if data.held_out and not drained else None
    )
    context = account and account.report(step - first_step, packings)
    return on_rank_zero(
        lambda: {
            "steps": step,
            "drained": drained,
            "samples": next_sample,
            "sequences_per_epoch": data.training.sequences,
            "resumed_from_step": marker.step if marker else None,
            "last_checkpoint_step": saved_step,
            "checkpoint_uri": spec.checkpoint.uri,
            "held_out": held_out,
            "held_out_documents": len(data.corpus.index) - len(data.training_documents),
            "training_documents": len(data.training_documents),
            "order1": (
                order1_bits_per_byte(data.corpus, data.training_documents, data.held_out)
                if data.held_out
                else None
            ),
            "content": content,
            "parameters": sum(p.numel() for p in model.parameters()),
            "attention": _attention_used(),
            "heads": heads,
            "context": context,
            "ranks": world.size,
            "threads": torch.get_num_threads(),
            "attempt_seconds": time.time() - started,
            "history": history,
        }
    )


def train_step(model: LanguageModel, read: StepData, valid: int, mesh: Mesh) -> float:
    """Forward and backward of one step; returns the loss in nats per valid token of all ranks.

    Gradients afterwards are exact for that loss: each micro-batch is divided by the step's valid
    tokens over all ranks, and FSDP sums.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for number, batch in enumerate(read.batches):
        accumulate(model, number == len(read.batches) - 1)
        loss = model(move(batch, mesh.device)) / divisor(valid)
        loss.backward()
        total += loss.detach()
    mine = float(total) if mesh.owns_tokens else 0.0
    return float(sum_over_ranks(mine, device=mesh.device)[0])


def open_data(spec: RunSpec) -> Data:
    """Index the source on rank 0, share the index, and split it; collective."""
    source, tokenizer = open_source(spec.data.source), open_tokenizer(spec.model.tokenizer)
    index: Index = on_rank_zero(lambda: build_index(source, tokenizer, spec.data.text_field))
    for rank, name in enumerate(on_all_ranks(differing(source, index))):
        if name is not None:
            raise DataError(
                f"{spec.data.source}: rank {rank} does not see {name} as rank 0 does; use a "
                "folder that all machines share, or s3://"
            )
    corpus = Corpus(source, tokenizer, spec.data.text_field, index)
    training, held = split(index, spec.data.holdout_fraction)
    length, packing = spec.sequence.length, spec.data.packing
    stream = Stream(corpus, training, length=length, packing=packing, seed=spec.training.seed)
    held_out = None
    if len(held) and spec.training.evaluate_sequences:
        held_stream = Stream(corpus, held, length=length, packing=packing, seed=EVALUATION_SEED)
        ratio = float(index.text_bytes[held].sum() / index.tokens[held].sum())
        held_out = HeldOut(
            stream=held_stream,
            sequences=min(spec.training.evaluate_sequences, held_stream.sequences),
            bytes_per_token=None if tokenizer.name == "bytes" else ratio,
        )
    elif spec.training.evaluate_sequences:
        log.warning("nothing is held out: %d document(s) cannot be split", len(index))
    return Data(corpus, stream, training, held_out)


def _resume_from(spec: RunSpec, checkpoints: Checkpointer, content: str) -> Marker | None:
    marker = checkpoints.newest()
    if marker is None:
        return None
    if spec.checkpoint.resume == "Never":
        raise CheckpointError(
            f"{spec.checkpoint.uri} already holds a checkpoint of step {marker.step}; resume it, "
            "or give this run a checkpoint folder of its own"
        )
    if marker.content_sha256 != content:
        raise CheckpointError(
            f"the data changed since the checkpoint of step {marker.step} was written (content "
            f"hash {marker.content_sha256[:12]}, now {content[:12]}), so its samples would be "
            "other ones; restore the data, or start anew in another checkpoint folder"
        )
    return marker


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _attention_used() -> list[Any]:
    from msa_kernels import backend

    return [dataclasses.asdict(record) for record in backend.used()]


def main() -> int:
    """Command line; exit codes: 0 done, 1 the run failed, 2 bad spec or data."""
    from msa_workloads.standalone import main as standalone

    return standalone(sys.argv[1:], Path.cwd())


if __name__ == "__main__":
    sys.exit(main())
