"""Checkpoints that are whole or absent.

A checkpoint is a folder ``step-00000100``: torch DCP files (model and optimizer, sharded, loadable
on any number of ranks), one random state per rank, the metrics so far, and ``complete.json``,
which is written last. Without a ``complete.json`` whose file sizes hold, the folder does not
count: a run that dies while saving resumes from the checkpoint before, and the next save clears
what was left. Old checkpoints are removed only after a newer one is committed.

Rank 0 decides what to resume from and tells the others, so ranks can never disagree.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import io
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from msa_workloads.heads import Order
from msa_workloads.model import LanguageModel
from msa_workloads.parallel.collective import on_all_ranks, on_rank_zero
from msa_workloads.permutation import key
from msa_workloads.runspec import RunSpec
from msa_workloads.space import checkpoint_errors
from msa_workloads.storage import Store

MARKER = "complete.json"
HISTORY = "history.jsonl"
PROBE = "probe"

SAVE_TIMEOUT_SECONDS = 600.0
"""A save or load that takes longer hangs: all stacks are dumped and the process ends, so that
whoever owns recovery can restart it. An 8B model with its optimizer writes in well under this."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written as asked; the message names the way out."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What ``complete.json`` says; ``next_sample`` is the first global sample not yet used."""

    step: int
    next_sample: int
    identity: dict[str, str]
    content_sha256: str
    ranks: int
    files: dict[str, int]
    saved_at: float
    head_orders: dict[str, list[int]] = field(default_factory=dict)
    """By layer, the order in which it stores its key/value heads, where that is not the model's:
    see docs/tensor-parallelism.md."""

    @property
    def folder(self) -> str:
        return folder_name(self.step)

    @property
    def orders(self) -> dict[int, Order]:
        """``head_orders``, as :func:`~msa_workloads.model.build_model` takes them."""
        return {int(layer): tuple(order) for layer, order in self.head_orders.items()}

    def to_json(self) -> str:
        """Without head orders where there are none: older programs read that as well."""
        raw = dataclasses.asdict(self)
        if not self.head_orders:
            del raw["head_orders"]
        return json.dumps(raw, indent=1, sort_keys=True)


def folder_name(step: int) -> str:
    """Folder of a step; zero-padded, so that names sort as numbers."""
    return f"step-{step:08d}"


def identity(spec: RunSpec) -> dict[str, str]:
    """Hashes of what must not change between a run and its continuation, by part.

    Degrees, batch split, length of training and rates may change; model, data, sequence length,
    pattern and seed may not.
    """
    parts = {
        "model": spec.model,
        "data": spec.data,
        "sequence.length": spec.sequence.length,
        "attention": (spec.attention.pattern, spec.attention.dense_layers),
        "training.seed": spec.training.seed,
    }
    return {name: _hash(part) for name, part in parts.items()}


def spec_hash(spec: RunSpec) -> str:
    """One hash over :func:`identity`."""
    return _hash(identity(spec))


def newest_complete(store: Store) -> Marker | None:
    """The newest checkpoint that is whole, or None. Reads only; call it on one rank."""
    for folder in reversed(store.folders()):
        marker = _read_marker(store, folder)
        if marker is not None:
            return marker
    return None


def cut_short(store: Store) -> list[str]:
    """Folders of checkpoints newer than the newest whole one: saves that were cut off, and what
    lost files or parts of them since."""
    marker = newest_complete(store)
    whole = marker.folder if marker else ""
    return [name for name in store.folders() if name.startswith("step-") and name > whole]


class Checkpointer:
    """Saves and loads the state of one run. All methods are collective: every rank calls them."""

    def __init__(
        self, store: Store, spec: RunSpec, *, timeout: float = SAVE_TIMEOUT_SECONDS
    ) -> None:
        self.store = store
        self._identity = identity(spec)
        self._keep = spec.checkpoint.keep
        self._seed = spec.training.seed
        self._timeout = timeout

    def check_shared(self) -> None:
        """Raise :class:`CheckpointError` unless every rank sees what rank 0 writes.

        A folder on a machine's own disk would give each machine a part of every checkpoint.
        """
        name = on_rank_zero(lambda: f"{PROBE}/{uuid.uuid4().hex}")
        with checkpoint_errors("checking checkpoint.uri", self.store.uri):
            on_rank_zero(lambda: self.store.write(name, b"shared?"))
        try:
            seen = self.store.read(name) == b"shared?"
        except FileNotFoundError:
            seen = False
        ranks = on_all_ranks(seen)
        on_rank_zero(lambda: self.store.delete(PROBE, MARKER))
        if not all(ranks):
            blind = [rank for rank, sees in enumerate(ranks) if not sees]
            raise CheckpointError(
                f"checkpoint.uri: ranks {blind} do not see what rank 0 writes to "
                f"{self.store.uri}; use a folder that all machines share, or s3://"
            )

    def newest(self) -> Marker | None:
        """The newest whole checkpoint as rank 0 sees it; raises when it is another run's."""
        marker = on_rank_zero(lambda: newest_complete(self.store))
        if marker is not None:
            different = [n for n, h in self._identity.items() if marker.identity.get(n) != h]
            if different:
                raise CheckpointError(
                    f"{self.store.uri}/{marker.folder} was written by a run with another "
                    f"{' and '.join(different)}; resume with the original job, or give this one "
                    "a checkpoint folder of its own"
                )
        return marker

    def save(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        next_sample: int,
        content_sha256: str,
        history: list[dict[str, Any]],
    ) -> Marker:
        """Write and commit a checkpoint; on return it is durable on every rank's account."""
        folder = folder_name(step)
        doing = f"saving the checkpoint of step {step}"
        with (
            checkpoint_errors(doing, self.store.uri),
            deadline(self._timeout, f"saving {self.store.uri}/{folder}"),
        ):
            on_rank_zero(lambda: self.store.delete(folder, MARKER))
            states, optimizers = get_state_dict(model, optimizer)
            dcp.save(
                {"model": states, "optimizer": optimizers},
                storage_writer=self.store.writer(folder),
            )
            self.store.write(f"{folder}/{_rng_name(dist.get_rank())}", _pack(_rng_state()))
            dist.barrier()

            def commit() -> Marker:
                rows = "".join(json.dumps(row) + "\n" for row in history)
                self.store.write(f"{folder}/{HISTORY}", rows.encode())
                marker = Marker(
                    step=step,
                    next_sample=next_sample,
                    identity=self._identity,
                    content_sha256=content_sha256,
                    ranks=dist.get_world_size(),
                    files=self.store.sizes(folder),
                    saved_at=time.time(),
                    head_orders={str(n): list(o) for n, o in model.head_orders.items()},
                )
                self.store.commit(f"{folder}/{MARKER}", marker.to_json().encode())
                self._prune(step)
                return marker

            return on_rank_zero(commit)

    def load(
        self, marker: Marker, model: LanguageModel, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, Any]]:
        """Restore model, optimizer and random state in place; returns the history of metrics.

        On another number of ranks, a rank without a saved random state gets one that depends on
        the seed, the step and its rank. The optimizer keeps its own rates, betas and decay, which
        a run may change when it goes on. Raises :class:`CheckpointError` for a model that stores
        its heads in another order than the checkpoint does.
        """
        if marker.orders != model.head_orders:
            raise CheckpointError(
                f"{self.store.uri}/{marker.folder} stores heads in another order than the model "
                "does; build the model with the orders of the checkpoint's marker"
            )
        doing = f"loading {self.store.uri}/{marker.folder}"
        with checkpoint_errors(doing, self.store.uri), deadline(self._timeout, doing):
            states, optimizers = get_state_dict(model, optimizer)
            state = {"model": states, "optimizer": optimizers}
            dcp.load(state, storage_reader=self.store.reader(marker.folder))
            said = [_without_parameters(group) for group in optimizer.param_groups]
            set_state_dict(
                model, optimizer,
                model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            )  # fmt: skip
            for group, values in zip(optimizer.param_groups, said, strict=True):
                group.update(values)
            rank = dist.get_rank()
            if _rng_name(rank) in marker.files:
                raw = self.store.read(f"{marker.folder}/{_rng_name(rank)}")
                _set_rng_state(torch.load(io.BytesIO(raw), weights_only=True))
            else:
                torch.manual_seed(key(self._seed, marker.step, rank))
            rows = self.store.read(f"{marker.folder}/{HISTORY}").decode().splitlines()
            return [json.loads(row) for row in rows]

    def _prune(self, step: int) -> None:
        """Remove all but the newest ``keep`` up to ``step``, and what never became whole."""
        older = [f for f in self.store.folders() if f.startswith("step-")]
        whole = [f for f in older if f <= folder_name(step) and _read_marker(self.store, f)]
        kept = set(whole[-max(1, self._keep) :])
        for folder in older:
            if folder not in kept and folder <= folder_name(step):
                self.store.delete(folder, MARKER)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End the process with a dump of all stacks when the body takes longer than ``seconds``.

    A hang in a collective cannot be interrupted from Python; leaving is the only way on.
    """
    log = sys.__stderr__ if sys.__stderr__ is not None else sys.stderr
    say = threading.Timer(
        seconds, log.write, [f"{what}: no end after {seconds:g} s; stacks of all threads:\n"]
    )
    say.daemon = True
    say.start()
    # faulthandler's own thread needs no interpreter lock, so it fires whatever holds that.
    faulthandler.dump_traceback_later(seconds + 0.5, exit=True, file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        say.cancel()


def _read_marker(store: Store, folder: str) -> Marker | None:
    try:
        raw = json.loads(store.read(f"{folder}/{MARKER}"))
        marker = Marker(**raw)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    sizes = store.sizes(folder)
    whole = all(sizes.get(name) == size for name, size in marker.files.items())
    return marker if whole and marker.folder == folder else None


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """What the spec and the device say of a group, which is not for a checkpoint to say."""
    return {name: value for name, value in group.items() if name != "params"}


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _pack(state: dict[str, torch.Tensor]) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def _hash(value: Any) -> str:
    def plain(item: Any) -> Any:
        return dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item  # type: ignore[arg-type]

    text = json.dumps(plain(value), sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
