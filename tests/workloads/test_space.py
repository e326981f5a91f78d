"""A full or closed place of checkpoints ends a run with that reason, on every rank alike."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msa_workloads.runspec import RunSpec
from msa_workloads.space import StorageError, checkpoint_errors
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

ON_TMPFS = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ON_TMPFS, "sh"]


def mounts(tmp_path: Path) -> bool:
    try:
        made = subprocess.run([*NAMESPACE, "1m", str(tmp_path), "true"], check=False, timeout=30)
    except FileNotFoundError:
        return False
    return made.returncode == 0


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(
    tmp_path: Path, make_spec: Callable[..., RunSpec]
):
    """There is room for one checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mounts(disk):
        pytest.skip("this machine lets nobody mount a small disk")
    spec = make_spec()
    spec = replace(spec, checkpoint=replace(spec.checkpoint, uri=f"{disk}/ckpt", keep=9))
    (tmp_path / "spec.json").write_text(spec.to_json())
    train = f"{sys.executable} -m msa_workloads.train --spec {tmp_path}/spec.json"
    done = subprocess.run(
        [*NAMESPACE, "700k", str(disk), "sh", "-c", f"{train}; echo code $?; ls {disk}/ckpt/*"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    _, ended, left = done.stdout.partition("code 1\n")
    said = f"error: saving the checkpoint of step 4: {disk}/ckpt: No space left on device"
    assert ended and done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
    assert left.count("complete.json") == 1 and "complete.json" in left.split("step-00000004")[0]


def test_a_full_disk_is_known_however_pytorch_puts_it(tmp_path: Path):
    if not mounts(tmp_path):
        pytest.skip("this machine lets nobody mount a small disk")
    (tmp_path / "try.py").write_text(FILL)
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [*NAMESPACE, "2m", str(disk), sys.executable, str(tmp_path / "try.py"), str(disk)],
        capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "RuntimeError: saving: rank 0: RuntimeError: unexpected pos 704 vs 598",
        f"StorageError: saving: {disk}: No space left on device; make room, or keep fewer "
        "(checkpoint.keep), and resume from the checkpoint before it",
    ], done.stderr


FILL = """
import os, sys
from msa_workloads.space import checkpoint_errors
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
for fill in (0, 3 << 19):
    with open(os.path.join(sys.argv[1], "file"), "wb") as file:
        file.write(bytes(fill))
    try:
        with checkpoint_errors("saving", sys.argv[1]):
            error = RuntimeError("unexpected pos 704 vs 598")
            raise CheckpointException("write", {0: _wrap_exception(error)})
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def wrapped(error: BaseException) -> WRAPPED_EXCEPTION:
    import traceback

    return error, traceback.extract_tb(error.__traceback__)


def test_what_pytorch_wraps_is_an_exception_with_rank_and_reason():
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(StorageError, match="saving: /ckpt: No space left on device; make room"),
        checkpoint_errors("saving", "/ckpt"),
    ):
        raise CheckpointException("write", {1: wrapped(full)})
    with (
        pytest.raises(RuntimeError, match="loading: rank 2: EOFError: cut short"),
        checkpoint_errors("loading", "/ckpt"),
    ):
        raise CheckpointException(
            "read", {3: wrapped(OSError(5)), 2: wrapped(EOFError("cut short"))}
        )
