"""Held-out quality in bits per byte, comparable over tokenizers, and what it is compared with.

With byte tokens it is exact: nats of the predicted bytes over ln 2 and their number. With another
tokenizer, nats per token are converted by the held-out set's own bytes per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from msa_workloads.context.exchange import paused
from msa_workloads.corpus import Corpus
from msa_workloads.data import IGNORE, Batch, Splits, Stream, collate
from msa_workloads.model import LanguageModel
from msa_workloads.parallel.collective import sum_over_ranks
from msa_workloads.parallel.mesh import Mesh

FIT_BYTES = 256 << 20
"""Bytes of training text that the order-1 model is fitted on at most; it has 65,792 counts."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out sequences of a run; the same for every seed."""

    stream: Stream
    sequences: int
    bytes_per_token: float | None
    """None for byte tokens, whose bytes are counted instead."""


@torch.no_grad()
def evaluate(model: LanguageModel, held: HeldOut, mesh: Mesh, split: Splits) -> dict[str, Any]:
    """Bits per byte over the held-out sequences; collective, the same result on every rank.

    Data ranks share the sequences. All run the same number of forward passes, since a sharded
    model communicates in each; a rank without a sequence left runs one that does not count.
    """
    model.eval()
    nats, predicted = 0.0, 0
    for start in range(0, held.sequences, mesh.data_ranks):
        k = start + mesh.data_rank
        sample = held.stream.sample(min(k, held.sequences - 1))
        batch = move(split.batch(collate([sample])), mesh.device)
        with paused():
            losses = model(batch, per_token=True)
        if k < held.sequences and mesh.owns_tokens:
            counted = _counted(batch.labels, held)
            nats += float(losses[counted].double().sum())
            predicted += int(counted.sum())
    model.train()
    (nats,) = sum_over_ranks(nats, device=mesh.device)
    (total,) = sum_over_ranks(predicted, device=mesh.device)
    bits = nats / math.log(2) / max(1, total)
    return {
        "bits_per_byte": bits if held.bytes_per_token is None else bits / held.bytes_per_token,
        "nats_per_token": nats / max(1, total),
        "predicted": int(total),
        "unit": "bytes" if held.bytes_per_token is None else "tokens",
        "sequences": held.sequences,
    }


def move(batch: Batch, device: torch.device) -> Batch:
    """A batch with its tensors on ``device``."""
    named = ("tokens", "labels", "positions", "documents")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in named})


def _counted(labels: torch.Tensor, held: HeldOut) -> torch.Tensor:
    """Labels that count: real bytes, without end-of-document, or all valid tokens."""
    valid = labels != IGNORE
    return valid & (labels < 256) if held.bytes_per_token is None else valid


def order1_bits_per_byte(
    corpus: Corpus, training: np.ndarray, held: HeldOut
) -> dict[str, Any] | None:
    """Bits per byte of an order-1 byte model on the same held-out bytes; None without byte tokens.

    Byte pairs with add-one smoothing, p(b | a) = (n(a, b) + 1) / (n(a) + 256), fitted on the
    training documents; the byte before a document's first is the start token.
    """
    if held.bytes_per_token is not None:
        return None
    counts = np.zeros((257, 256), dtype=np.int64)
    fitted = 0
    for document in training:
        if fitted >= FIT_BYTES:
            break
        text = np.frombuffer(corpus.text(int(document)), dtype=np.uint8).astype(np.int64)
        before = np.concatenate(([256], text[:-1]))
        counts += np.bincount(before * 256 + text, minlength=257 * 256).reshape(257, 256)
        fitted += len(text)
    bits = np.log2((counts.sum(1, keepdims=True) + 256) / (counts + 1))
    total, predicted = 0.0, 0
    for k in range(held.sequences):
        sample = held.stream.sample(k)
        real = (sample.labels >= 0) & (sample.labels < 256)
        total += float(bits[sample.tokens[real], sample.labels[real]].sum())
        predicted += int(real.sum())
    return {
        "bits_per_byte": total / max(1, predicted),
        "predicted": predicted,
        "fitted_bytes": fitted,
    }
