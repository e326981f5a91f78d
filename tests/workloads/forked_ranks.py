"""Ranks as forks of one process that has imported everything: many ranks for one start-up.

    python forked_ranks.py TEST_FILE FUNCTION RANKS FOLDER

Every rank calls the function with torchrun's environment and the arguments that are pickled in
the folder, and pickles its result into it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARGUMENTS = "arguments"
DEADLINE = 500.0
"""Seconds after which ranks hang; generous for a machine on which much else runs."""


def on_forks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """The function's result on every rank; fails with the first rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ARGUMENTS).write_bytes(pickle.dumps(arguments))
        command = [
            sys.executable, __file__, function.__code__.co_filename, function.__name__,
            str(ranks), folder,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [pickle.loads((Path(folder) / str(n)).read_bytes()) for n in range(ranks)]


def main(path: str, name: str, ranks: int, folder: str) -> int:
    import torch

    torch.set_num_threads(1)
    function = runpy.run_path(path)[name]
    arguments = pickle.loads((Path(folder) / ARGUMENTS).read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
            faulthandler.enable()  # a rank that its C library aborts has no traceback else
            code = 0
            try:
                (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(*arguments)))
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    failed = False
    for _ in range(ranks):
        gone, status = os.wait()
        if status and not failed:
            failed = True
            code = os.waitstatus_to_exitcode(status)
            print(f"rank {children.index(gone)} was the first to end: {code}", file=sys.stderr)
            for child in children:
                try:
                    os.kill(child, 15)  # the others would wait for the one that is gone
                except ProcessLookupError:
                    continue
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
