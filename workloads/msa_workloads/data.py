"""Samples: sample ``k`` is a pure function of (source, seed, k), on any rank, at any time.

The documents of an epoch are put in a seeded order, joined into one stream of tokens and cut into
sequences; a stateless permutation then names the sequence that is sample ``k``. Resuming, or
resuming on another number of ranks, is starting at another ``k``: no sample repeats, none is
left out.

Labels are shifted here, on the whole stream, before anything is split over ranks: each token of a
document is predicted exactly once, also where the document is cut between two sequences, and the
last token of a document predicts nothing. Positions restart at every document, and at a cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from msa_workloads.corpus import Corpus
from msa_workloads.permutation import key, permute, shuffled
from msa_workloads.sources import DataError

if TYPE_CHECKING:
    from msa_workloads.context.attention import Attend

IGNORE = -100
"""Label of a token that predicts nothing (torch's own default for cross-entropy)."""

EVALUATION_SEED = 0x6E76616C
"""Evaluation always reads the same sequences, whatever a run's seed."""


@dataclass(frozen=True)
class Sample:
    """One sequence; arrays of shape (length,): int64, and int32 for document ids."""

    index: int
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: np.ndarray

    @property
    def packing(self) -> tuple[int, ...]:
        """Lengths of its documents, padding included."""
        ends = np.flatnonzero(np.diff(self.documents)) + 1
        return tuple(np.diff(ends, prepend=0, append=len(self.documents)).tolist())

    @property
    def digest(self) -> int:
        """62 bits over the global index and the tokens; sums over ranks prove what was read."""
        return key(self.index, zlib.crc32(self.tokens.tobytes())) >> 2


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank; tensors of shape (sequences, length).

    Where context ranks share the sequences, the rows of this rank, and ``attend``, which computes
    their attention over the rows of all ranks.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    attend: Attend | None = None
    whole: bool = False
    """Every row is one document, which more kernels serve than packed ones."""

    @property
    def valid(self) -> int:
        """Labels that predict something."""
        return int((self.labels != IGNORE).sum())


class Splits(Protocol):
    """How a rank takes its part of a batch."""

    def batch(self, whole: Batch) -> Batch:
        """This rank's rows of a batch of whole sequences."""
        ...


class Whole:
    """The split of a rank that holds whole sequences."""

    def batch(self, whole: Batch) -> Batch:
        return whole


class Stream:
    """Samples over ``documents`` of a corpus.

    With ``packing`` documents follow each other without padding and only the last sequence of an
    epoch is padded; without it each document starts a sequence of its own.
    """

    def __init__(
        self, corpus: Corpus, documents: np.ndarray, *, length: int, packing: bool, seed: int
    ) -> None:
        if not len(documents):
            raise DataError("no documents to read samples from")
        self.length = length
        self._corpus = corpus
        self._documents = documents
        self._seed = seed
        spans = corpus.index.tokens[documents]
        if not packing:
            spans = -(-spans // length) * length
        self._spans = spans
        self.sequences = int(-(-spans.sum() // length))
        """Sequences per epoch."""
        self._layout: tuple[int, np.ndarray, np.ndarray] | None = None

    def sample(self, k: int) -> Sample:
        """Sample ``k``, any integer from 0 on."""
        epoch, at = divmod(k, self.sequences)
        order, ends = self._epoch(epoch)
        sequence = permute(at, self.sequences, key(self._seed, epoch, 1))
        return self._cut(k, sequence * self.length, order, ends)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in this epoch's order, and where each one's span ends in the stream."""
        if self._layout is None or self._layout[0] != epoch:
            keys = self._corpus.index.key[self._documents]
            order = shuffled(keys, key(self._seed, epoch, 0))
            self._layout = (epoch, self._documents[order], np.cumsum(self._spans[order]))
        return self._layout[1], self._layout[2]

    def _cut(self, k: int, begin: int, order: np.ndarray, ends: np.ndarray) -> Sample:
        length = self.length
        tokens = np.full(length, self._corpus.tokenizer.pad, dtype=np.int64)
        labels = np.full(length, IGNORE, dtype=np.int64)
        positions = np.arange(length, dtype=np.int64)
        documents = np.zeros(length, dtype=np.int32)
        slot, piece = int(np.searchsorted(ends, begin, side="right")), 0
        at = 0
        while at < length and slot < len(order):
            document = order[slot]
            total = int(self._corpus.index.tokens[document])
            first = begin + at - (int(ends[slot - 1]) if slot else 0)
            span = int(ends[slot]) - begin - at
            take = max(0, min(length - at, total - first))
            if take:
                # One token further than the sequence: the label of its last position.
                ids = self._corpus.tokens(document, first, min(total, first + take + 1))
                tokens[at : at + take] = ids[:take]
                labels[at : at + len(ids) - 1] = ids[1:]
                positions[at : at + take] = np.arange(take)
                documents[at : at + take] = piece
                piece += 1
            padding = min(length - at, span) - take
            if padding > 0:
                self._pad(positions, documents, at + take, padding, piece)
                piece += 1
            at += take + max(0, padding)
            slot += 1
        if at < length:
            self._pad(positions, documents, at, length - at, piece)
        return Sample(k, tokens, labels, positions, documents)

    @staticmethod
    def _pad(
        positions: np.ndarray, documents: np.ndarray, at: int, count: int, piece: int
    ) -> None:
        """Padding is a document of its own, so that no real token attends to it."""
        positions[at : at + count] = np.arange(count)
        documents[at : at + count] = piece


@dataclass(frozen=True)
class StepData:
    """What one rank reads for one optimizer step: its part of ``samples``, how many labels in it
    are valid, a digest of the whole samples, and the lengths of each one's documents."""

    batches: tuple[Batch, ...]
    samples: tuple[int, ...]
    valid: int
    digest: int
    packings: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Loader:
    """Deals the samples of a step over data ranks: a step is ``per_step`` consecutive samples.

    Which samples a step has depends on ``per_step`` alone, not on how many ranks share them.
    """

    stream: Stream
    rank: int
    ranks: int
    micro_batch: int
    accumulation: int
    split: Splits = field(default_factory=Whole)

    @property
    def per_step(self) -> int:
        return self.ranks * self.micro_batch * self.accumulation

    def indices(self, first: int) -> Iterator[list[int]]:
        """Sample numbers of each micro-batch of the step that starts at sample ``first``."""
        for micro in range(self.accumulation):
            start = first + (micro * self.ranks + self.rank) * self.micro_batch
            yield list(range(start, start + self.micro_batch))

    def step(self, first: int) -> StepData:
        """Read the step that starts at global sample ``first``."""
        groups = [[self.stream.sample(k) for k in ks] for ks in self.indices(first)]
        samples = [sample for group in groups for sample in group]
        batches = tuple(self.split.batch(collate(group)) for group in groups)
        return StepData(
            batches=batches,
            samples=tuple(sample.index for sample in samples),
            valid=sum(batch.valid for batch in batches),
            digest=sum(sample.digest for sample in samples) % 2**62,
            packings=tuple(sample.packing for sample in samples),
        )


def collate(samples: list[Sample]) -> Batch:
    """Stack samples to tensors of shape (len(samples), length)."""

    def stack(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))

    return Batch(
        stack("tokens"), stack("labels"), stack("positions"), stack("documents"),
        whole=all(len(sample.packing) == 1 for sample in samples),
    )  # fmt: skip


class Prefetcher:
    """Reads the next step in a thread while this one is computed; use as a context manager."""

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._first = first
        self._next: Future[StepData] = self._pool.submit(loader.step, first)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def next(self) -> StepData:
        """The step at hand; starts reading the one after it."""
        data = self._next.result()
        self._first += self._loader.per_step
        self._next = self._pool.submit(self._loader.step, self._first)
        return data
