"""A checkpoint is whole or absent, on disk and on S3, whenever the writer dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msa_workloads.checkpoint import (
    MARKER,
    Marker,
    cut_short,
    folder_name,
    newest_complete,
    spec_hash,
)
from msa_workloads.runspec import RunSpec
from msa_workloads.storage import CommitConflict, S3Store, open_store

ROWS = [{"step": 1, "loss": 2.0, "elapsed": 1.0}]


def trainer(spec_json: str, timeout: float = 120.0, store: Any = None) -> Any:
    """A small model with optimizer state, and its checkpointer, on this rank."""
    import torch
    from msa_workloads.checkpoint import Checkpointer
    from msa_workloads.model import build_model
    from msa_workloads.optimizer import build_optimizer
    from msa_workloads.parallel.mesh import build_mesh, join_world

    spec = RunSpec.from_json(spec_json)
    world = join_world("cpu")
    mesh = build_mesh(spec.mesh, world)
    model = build_model(spec, 260, mesh if world.size > 1 else None, world.device)
    optimizer = build_optimizer(model, spec.training)
    torch.manual_seed(world.rank)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer, Checkpointer(
        store or open_store(spec.checkpoint.uri), spec, timeout=timeout
    )  # fmt: skip


def save(trained: Any, step: int) -> Marker:
    model, optimizer, checkpoints = trained
    return checkpoints.save(
        model, optimizer, step=step, next_sample=10 * step, content_sha256="c", history=ROWS
    )


def fingerprint(model: Any, optimizer: Any) -> dict[str, float]:
    """Sums over whole tensors of parameters and optimizer states, by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.tensor import DTensor

    states, optimizers = get_state_dict(model, optimizer)
    out = {}
    for name, value in {**states, **_flat(optimizers["state"])}.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        out[name] = float((whole.double() * (1 + whole.double().abs())).sum())
    return out


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{p}.{k}": v for p, values in state.items() for k, v in values.items()}


def save_steps(spec: str, steps: list[int]) -> dict[str, float]:
    trained = trainer(spec)
    for step in steps:
        save(trained, step)
    return fingerprint(*trained[:2])


def load_newest(spec: str) -> tuple[dict[str, float], int, list[Any], float]:
    """State after loading the newest checkpoint over a freshly perturbed model."""
    import torch

    model, optimizer, checkpoints = trainer(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(7.0)
    marker = checkpoints.newest()
    rows = checkpoints.load(marker, model, optimizer)
    return fingerprint(model, optimizer), marker.next_sample, rows, torch.rand(1).item()


@pytest.mark.slow
def test_states_survive_on_any_number_of_ranks(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    def spec(ranks: int) -> str:
        return make_spec(mesh={"data_shard": ranks}).to_json()

    saved = on_ranks(save_steps, 2, spec=spec(2), steps=[1, 2])[0]
    randoms = {}
    for ranks in (1, 2):
        for rank, (state, sample, rows, random) in enumerate(
            on_ranks(load_newest, ranks, spec=spec(ranks))
        ):
            assert state.keys() == saved.keys()
            for name, value in saved.items():
                assert state[name] == pytest.approx(value, rel=1e-6), name
            assert (sample, rows) == (20, ROWS)
            randoms[ranks, rank] = random
    # Each rank goes on with its own random numbers, whatever the number of ranks.
    assert randoms[1, 0] == randoms[2, 0] != randoms[2, 1]


class DiesAtCommit:
    """A store whose process is killed when everything but the marker is written."""

    def __init__(self, uri: str, step: int) -> None:
        self._store, self._step = open_store(uri), step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, path: str, data: bytes) -> None:
        if path.startswith(folder_name(self._step)):
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.commit(path, data)


def save_and_die(spec: str) -> None:
    trained = trainer(spec, store=DiesAtCommit(RunSpec.from_json(spec).checkpoint.uri, 4))
    save(trained, 2)
    save(trained, 4)


@pytest.mark.slow
def test_a_run_killed_while_saving_resumes_from_the_checkpoint_before(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    spec = make_spec(checkpoint={"keep": 1})
    store = open_store(spec.checkpoint.uri)
    ((code, _),) = on_ranks(save_and_die, 1, check=False, spec=spec.to_json())
    assert code == -signal.SIGKILL
    assert store.folders() == [folder_name(2), folder_name(4)]
    assert ".metadata" in store.sizes(folder_name(4))
    marker = newest_complete(store)
    assert marker is not None
    assert (marker.step, marker.next_sample) == (2, 20)
    assert cut_short(store) == [folder_name(4)]
    # Saving step 4 again clears what was left of it, and only then is step 2 dropped.
    (Path(spec.checkpoint.uri) / folder_name(4) / "stale.distcp").write_text("left over")
    on_ranks(save_steps, 1, spec=spec.to_json(), steps=[4])
    marker = newest_complete(store)
    assert marker is not None
    assert marker.step == 4
    assert store.folders() == [folder_name(4)]
    assert "stale.distcp" not in store.sizes(folder_name(4))


def save_and_prune(spec: str) -> list[Any]:
    """What is on disk after several events; run in one process, since starting one is slow."""
    trained = trainer(spec)
    store = trained[2].store
    seen: list[Any] = []
    for step in (2, 4, 6):
        save(trained, step)
        seen.append(store.folders())
    # A file that was cut short (a full disk, a lost machine) makes its checkpoint not count.
    root = Path(RunSpec.from_json(spec).checkpoint.uri)
    data = next((root / folder_name(6)).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    seen.append(newest_complete(store).step)  # type: ignore[union-attr]
    assert cut_short(store) == [folder_name(6)]
    (root / folder_name(4) / MARKER).write_text("{")
    seen.append(newest_complete(store))
    save(trained, 8)
    seen.append(store.folders())
    return seen


@pytest.mark.slow
def test_only_whole_checkpoints_count_and_pruning_keeps_the_newest(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    (seen,) = on_ranks(save_and_prune, 1, spec=make_spec().to_json())
    two, four, six, eight = (folder_name(step) for step in (2, 4, 6, 8))
    assert seen == [[two], [two, four], [four, six], 4, None, [eight]]


def save_twenty_times(spec: str) -> list[int]:
    import gc

    import psutil

    trained = trainer(spec)
    resident = []
    for step in range(1, 26):
        save(trained, step)
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    return resident


@pytest.mark.slow
def test_memory_is_stable_over_twenty_saves(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    (resident,) = on_ranks(save_twenty_times, 1, spec=make_spec().to_json())
    # The first saves load code and fill allocator caches; a leak of one model a save would show.
    assert max(resident[5:]) - resident[4] < 4 << 20, resident


def save_alone(spec: str) -> None:
    """Rank 1 never joins the save: what a lost peer looks like to the others."""
    import torch
    import torch.distributed as dist

    trained = trainer(spec, timeout=3.0)
    if dist.get_rank() == 0:
        save(trained, 1)
    else:
        dist.recv(torch.zeros(1), src=0)  # ends with an error when rank 0 is gone


@pytest.mark.slow
def test_a_save_that_hangs_dumps_all_stacks_and_ends(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    spec = make_spec(mesh={"data_shard": 2}).to_json()
    (code, errors), _ = on_ranks(save_alone, 2, check=False, spec=spec)
    assert code == 1
    assert "step-00000001: no end after 3 s; stacks of all threads" in errors
    assert "in save" in errors
    assert "in on_rank_zero" in errors


def not_shared(spec: str, folders: list[str]) -> str:
    import torch.distributed as dist
    from msa_workloads.checkpoint import Checkpointer, CheckpointError
    from msa_workloads.parallel.mesh import join_world

    rank = join_world("cpu").rank
    checkpoints = Checkpointer(open_store(folders[rank]), RunSpec.from_json(spec))
    try:
        checkpoints.check_shared()
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
    return "shared"


@pytest.mark.slow
def test_a_folder_that_ranks_do_not_share_is_refused(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    for message in on_ranks(not_shared, 2, spec=make_spec().to_json(), folders=folders):
        assert "ranks [1] do not see what rank 0 writes" in message
    assert not list((tmp_path / "one").iterdir())


def round_trip_on_s3(spec: str) -> list[Any]:
    import torch

    trained = trainer(spec)
    for step in (1, 2, 3):
        save(trained, step)
    before = fingerprint(*trained[:2])
    with torch.no_grad():
        for p in trained[0].parameters():
            p.zero_()
    marker = trained[2].newest()
    rows = trained[2].load(marker, *trained[:2])
    return [before, fingerprint(*trained[:2]), rows, trained[2].store.folders(), marker]


@pytest.mark.slow
def test_checkpoints_on_s3(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec], s3: Any
) -> None:
    spec = make_spec(checkpoint={"uri": "s3://corpus/runs/a"})
    ((before, after, rows, folders, marker),) = on_ranks(round_trip_on_s3, 1, spec=spec.to_json())
    assert after == before
    assert rows == ROWS
    assert folders == [folder_name(2), folder_name(3)]
    assert marker.files.keys() == {
        ".metadata", "__0_0.distcp", "history.jsonl", "rng-00000.pt"
    }  # fmt: skip
    s3.delete_object(Bucket="corpus", Key=f"runs/a/{folder_name(3)}/{MARKER}")
    newest = newest_complete(open_store(spec.checkpoint.uri))
    assert newest is not None
    assert newest.step == 2


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_of_two_writers_one_commits(kind: str, tmp_path: Path, request: Any) -> None:
    if kind == "s3":
        request.getfixturevalue("s3")
    uri = str(tmp_path / "ckpt") if kind == "folder" else "s3://corpus/ckpt"
    one, two = open_store(uri), open_store(uri)
    for store in (one, two):
        store.write("step-1/data", b"x")
    one.commit(f"step-1/{MARKER}", b"one")
    with pytest.raises(CommitConflict, match="another run writes checkpoints here"):
        two.commit(f"step-1/{MARKER}", b"two")
    assert two.read(f"step-1/{MARKER}") == b"one"
    with pytest.raises(FileNotFoundError):
        two.read("step-2/none")
    two.delete("step-1", MARKER)
    two.delete("step-1", MARKER)
    assert one.sizes("step-1") == {}
    assert MARKER not in json.dumps(one.folders())


def test_addresses_of_checkpoints(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    assert open_store("file:///my%20disk/ckpt").uri == "/my disk/ckpt"
    assert open_store(str(tmp_path / "none")).folders() == []
    with pytest.raises(ValueError, match="allowed: a folder, file:// or s3://"):
        open_store("gs://bucket/x")
    with pytest.raises(ValueError, match="need s3://bucket/prefix"):
        S3Store("s3://bucket")


def test_the_identity_of_a_run(make_spec: Callable[..., RunSpec]) -> None:
    base = spec_hash(make_spec())
    assert base == spec_hash(make_spec("elsewhere", training={"max_steps": 99}, threads=4))
    assert base == spec_hash(make_spec(mesh={"data_shard": 2}, sequence={"micro_batch": 1}))
    changes = [
        {"training": {"seed": 1}},
        {"sequence": {"length": 64}},
        {"attention": {"dense_layers": (0,)}},
        {"attention": {"pattern": {"type": "Dense"}}},
        {"data": {"holdout_fraction": 0.2}},
        {"model": {"config": {"model_type": "llama"}}},
    ]
    assert len({base, *(spec_hash(make_spec(**change)) for change in changes)}) == 7
