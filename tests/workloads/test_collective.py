"""What rank 0 does ends alike on every rank."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from msa_kernels.pattern import Window
from msa_workloads.checkpoint import MARKER, Checkpointer, Marker, identity
from msa_workloads.parallel.collective import meet, on_rank_zero
from msa_workloads.parallel.mesh import build_mesh, join_world
from msa_workloads.runspec import MeshSpec
from msa_workloads.storage import FolderStore

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import Case


class HereOnlyError(Exception):
    """Of a file that other processes cannot import."""


class GoneError(Exception):
    """Goes out and does not come in."""

    def __reduce__(self) -> Any:
        return int, ("none",)


def endings() -> list[tuple[str, str]]:
    """How each act ends on this rank."""
    dist.init_process_group("gloo")

    def fails(error: Exception) -> Any:
        raise error

    found = []
    for act in (
        lambda: fails(ValueError("plain")),
        lambda: Window(0),
        lambda: fails(GoneError("halfway")),
        lambda: fails(HereOnlyError("local")),
        lambda: fails(OSError(threading.Lock())),
        threading.Lock,
    ):
        try:
            on_rank_zero(act)
        except Exception as error:
            found.append((type(error).__name__, f"{error} {getattr(error, 'path', '')}"))
    return [*found, ("result", str(on_rank_zero(lambda: [dist.get_rank(), 7])))]


def test_results_and_errors_reach_every_rank_whatever_they_are():
    zero, one = on_forks(endings, 2)
    assert zero == one
    kinds, texts = zip(*zero, strict=True)
    assert kinds == (
        "ValueError", "PatternError", "RuntimeError", "RuntimeError", "RuntimeError",
        "TypeError", "result",
    )  # fmt: skip
    assert texts[1] == "window: must be at least 1, found 0 window"
    assert texts[2].startswith("GoneError: halfway")
    assert texts[3].startswith("HereOnlyError: local")
    assert texts[4].startswith("OSError: <unlocked _thread.lock object")
    assert texts[6] == "[0, 7]"


def late(folder: str) -> tuple[list[int], list[int]]:
    """Rank 0 works alone, and then rank 1 comes late, for longer than any collective may wait;
    then the seeds of this rank's draws on meshes of two."""
    dist.init_process_group("gloo")
    dist.barrier()
    patience = timedelta(seconds=2)
    distributed_c10d._set_pg_timeout(patience)
    longer = 1.5 * patience.total_seconds()
    found = on_rank_zero(lambda: threading.Event().wait(longer) or 7)
    if dist.get_rank() == 1:
        threading.Event().wait(longer)
    meet()
    distributed_c10d._set_pg_timeout(timedelta(minutes=5))
    every: list[int] = [0, 0]
    dist.all_gather_object(every, found)
    # Rank 1 sees a newer checkpoint, as of a store that is not the same for all: rank 0 decides.
    spec = Case().spec()
    seen = FolderStore(Path(folder) / str(dist.get_rank()))
    for step in range(1 + dist.get_rank()):
        marker = Marker(
            step=step, next_sample=0, identity=identity(spec), content_sha256="", ranks=2,
            files={}, saved_at=0.0,
        )  # fmt: skip
        seen.write(f"{marker.folder}/{MARKER}", marker.to_json().encode())
    newest = Checkpointer(seen, spec).newest()
    assert newest is not None and newest.step == 0
    splits = (MeshSpec(data_replicate=2), MeshSpec(context=2), MeshSpec(tensor=2))
    seeds = [build_mesh(some, join_world("cpu")).own_seed(3) for some in splits]
    # Rank 0 has the store, in which the other may still look for the last mesh's addresses.
    dist.barrier()
    return every, seeds


def test_ranks_wait_longer_for_one_that_works_alone_than_for_a_collective(tmp_path: Path):
    (every, seeds), (same, others) = on_forks(late, 2, str(tmp_path))
    assert every == same == [7, 7]
    # Ranks with tokens of their own drop out others; tensor ranks share theirs.
    assert [mine == theirs for mine, theirs in zip(seeds, others, strict=True)] == [
        False, False, True,
    ]  # fmt: skip
