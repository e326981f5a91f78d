"""When a rank fails, dies or stands still, the others end soon and say which one it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


def lose_one(how: str) -> None:
    """Rank 1 of three leaves in this way; the others wait for it where nothing can wake them."""
    import threading

    import torch.distributed as dist
    from msa_workloads.parallel.watch import Watch

    dist.init_process_group("gloo")
    dist.barrier()
    # A rank that fails is known by what it says, however long silence would be borne.
    watch = Watch(beat=0.2, silent=20.0 if how == "fails" else 4.0, grace=0.5)
    if how == "stands still" and dist.get_rank() == 1:
        # It never beats, and ends when its peers are gone.
        dist.barrier()
    with watch:
        if dist.get_rank() == 1:
            if how == "fails":
                raise LookupError("no such token")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fails", "LookupError: no such token"),
        ("dies", "rank 1 has not answered"),
        ("stands still", "rank 1 has not answered"),
    ],
)
def test_the_others_end_and_name_the_rank(
    on_ranks: Callable[..., Any], how: str, says: str
) -> None:
    results = on_ranks(lose_one, 3, check=False, how=how)
    assert all(code != 0 for code, _ in results)
    for rank in (0, 2):
        code, errors = results[rank]
        assert code == 1
        assert f"rank {rank} ends, because rank 1" in errors
        assert says in errors
    if how == "fails":
        assert "lose_one" in results[0][1], "the traceback of the rank that failed"


def train_with_a_fault(spec: str) -> None:
    """Rank 1 cannot read its data from the third step on."""
    from msa_workloads import train
    from msa_workloads.data import Loader
    from msa_workloads.parallel.mesh import join_world
    from msa_workloads.progress import Silent
    from msa_workloads.runspec import RunSpec

    world, read = join_world("cpu"), Loader.step

    def step(self: Loader, first: int) -> Any:
        if world.rank == 1 and first >= 4:
            raise OSError("the disk is gone")
        return read(self, first)

    Loader.step = step  # type: ignore[method-assign]
    train.run(RunSpec.from_json(spec), Silent())


@pytest.mark.slow
def test_a_run_ends_when_a_rank_fails(
    on_ranks: Callable[..., Any], make_spec: Callable[..., Any]
) -> None:
    spec = make_spec(mesh={"context": 2}, sequence={"micro_batch": 2})
    (first, errors), (second, own) = on_ranks(
        train_with_a_fault, 2, check=False, spec=spec.to_json()
    )
    assert first != 0 and second != 0
    assert "OSError: the disk is gone" in own
    # Rank 0 has lost its peer in a collective, or has been told why.
    assert "rank 1 failed" in errors or "Connection" in errors or "connection" in errors
