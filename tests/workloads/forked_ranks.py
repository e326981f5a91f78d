"""Ranks as forks of one process that has imported everything: no rank has a start-up of its own.

That process is started with the first ranks of a pytest process and ends with it. Everything else
is new for every call: the test file is run again, and ranks have the caller's environment and
folder. Ranks share the seed of hashes; those of torchrun and Ray, which other tests start, do not.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ARGUMENTS, CODES, FIRST, START_UP = "arguments", "codes", "first", "start-up.err"
DEADLINE = 1500.0
"""Seconds after which ranks hang; generous for a machine on which much else runs."""


def on_forks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """The function's result on every rank; fails with the first rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        codes = forked(function, ranks, Path(folder), arguments, {}, ends_others=True)
        assert not any(codes), "\n".join([*errors(Path(folder), ranks), _first(Path(folder))])
        return results(Path(folder), ranks)


def forked(
    function: Callable[..., Any], ranks: int, folder: Path, arguments: tuple[Any, ...],
    keywords: dict[str, Any], *, ends_others: bool, **environment: str,
) -> list[int]:  # fmt: skip
    """Call it on ranks that have torchrun's environment; returns their exit codes.

    The folder must be empty. With ``ends_others`` the first rank that fails ends those that would
    wait for it.
    """
    (folder / ARGUMENTS).write_bytes(pickle.dumps((arguments, keywords)))
    order = {
        "path": function.__code__.co_filename, "name": function.__name__, "ranks": ranks,
        "folder": str(folder), "ends_others": ends_others, "directory": os.getcwd(),
        "environment": {**os.environ, **environment},
    }  # fmt: skip
    _Parent.there().obeys(order)
    assert (folder / CODES).exists(), (folder / START_UP).read_text()
    return json.loads((folder / CODES).read_text())


def results(folder: Path, ranks: int) -> list[Any]:
    """What every rank returned."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def errors(folder: Path, ranks: int) -> list[str]:
    """What every rank wrote to stderr."""
    return [(folder / f"{rank}.err").read_text() for rank in range(ranks)]


def _first(folder: Path) -> str:
    return (folder / FIRST).read_text()


class _Parent:
    """The process of which ranks are grandchildren, as its client."""

    _one: _Parent | None = None

    @classmethod
    def there(cls) -> _Parent:
        """The one of this process; another one when it ended."""
        if cls._one is None or cls._one._process.poll() is not None:
            cls._one = cls()
        return cls._one

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        atexit.register(self._end)

    def obeys(self, order: dict[str, Any]) -> None:
        """Returns when the ranks have ended; ends all of them where they hang."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        try:
            answered, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
            assert answered, f"no end of {order['name']} within {DEADLINE:g} s"
            assert self._process.stdout.readline(), "the parent of all ranks ended"
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Fork a parent of ranks for every order; end with the one who gives them."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _import_everything()
        tasks = Path("/proc/self/task")
        assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "a fork has one thread only"
        _serve(answers)


def _serve(answers: TextIO) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _obey(**json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print(file=answers, flush=True)


def _import_everything() -> None:
    import hypothesis.strategies
    import pytest
    import torch
    from msa_kernels import hf
    from msa_workloads import train
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    del hypothesis, pytest, torch, hf, train, AutoModelForCausalLM, modeling_llama, modeling_qwen3


def _obey(
    path: str, name: str, ranks: int, folder: str, ends_others: bool, directory: str,
    environment: dict[str, str],
) -> None:  # fmt: skip
    place = Path(folder)
    _redirect(0, Path(os.devnull), os.O_RDONLY)
    _redirect(1, Path(os.devnull), os.O_WRONLY)
    _redirect(2, place / START_UP)
    try:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment},
            WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1",
        )  # fmt: skip
        function = runpy.run_path(path)[name]
        arguments, keywords = pickle.loads((place / ARGUMENTS).read_bytes())
        children: list[int] = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                _redirect(2, place / f"{rank}.err")
                _rank(lambda: function(*arguments, **keywords), place / f"{rank}.pickle")
            children.append(child)
        (place / CODES).write_text(json.dumps(_codes(children, place, ends_others)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()


def _rank(call: Callable[[], Any], result: Path) -> None:
    """Never returns: the threads of PyTorch that are still joining when an interpreter goes away
    have aborted a finished rank, so it leaves without tearing them down."""
    import torch

    faulthandler.enable()  # a rank that its C library aborts has no traceback else
    code = 1
    try:
        # Now, while there is one thread: a pool that was made before a fork is made again by
        # whoever sets the number first, and two that do so at once abort.
        torch.set_num_threads(1)
        result.write_bytes(pickle.dumps(call()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _codes(children: list[int], place: Path, ends_others: bool) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        gone, status = os.wait()
        codes[gone] = os.waitstatus_to_exitcode(status)
        if codes[gone] and not any(code for child, code in codes.items() if child != gone):
            said = f"rank {children.index(gone)} was the first to end: {codes[gone]}"
            (place / FIRST).write_text(said)
            for child in children if ends_others else ():
                if child not in codes:
                    os.kill(child, signal.SIGTERM)  # it would wait for the one that is gone
    return [codes[child] for child in children]


def _redirect(
    number: int, path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_APPEND
) -> None:
    file = os.open(path, flags, 0o600)
    os.dup2(file, number)
    os.close(file)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
