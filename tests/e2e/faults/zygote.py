"""Starts operators in a tenth of a second: a process that has imported everything, and forks.

    python -m e2e.faults.zygote CLOCK

Each line of its input asks for one: {"argv", "env", "log"}; it answers with a pid. CLOCK is a file
that holds a number of seconds by which every operator's wall clock is wrong, and may change at any
time; the monotonic clock goes on as it does when a real clock is set.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import time

_real = time.time
_SIZE = struct.calcsize("d")
PR_SET_PDEATHSIG = 1


def _set_clock(path: str) -> None:
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), _SIZE)
    time.time = lambda: _real() + struct.unpack("d", shared[:_SIZE])[0]


def _become(order: dict) -> int:
    """In the child: an operator as if it had been started by itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["env"])
    from msa_operator.main import main

    return main(order["argv"])


def main() -> None:
    _set_clock(sys.argv[1])
    import msa_operator.main  # noqa: F401  what takes long, once

    # Nobody here waits for them: the kernel forgets them when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os._exit(_become(order))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
