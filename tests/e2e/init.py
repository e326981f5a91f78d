"""Process 1 of a cluster's machine: reaps what is orphaned. Its end is the machine's end."""

import os
import signal
import sys

AWAITED = {signal.SIGCHLD, signal.SIGTERM}

# Blocked first: a signal that arrives before the wait is then kept for it.
signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
with open(sys.argv[1], "w") as ready:
    ready.write("ready")
while signal.sigwait(AWAITED) != signal.SIGTERM:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
