"""What a test of the operator's faults stands on: started together and ended together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..apiserver import ApiServer
from . import access, definitions
from .proxy import Proxy
from .running import Operator, Zygote
from .simulator import Simulator
from .world import World


@dataclass
class Stand:
    """A real API server with a proxy before it, simulated pods, and operators to be started."""

    folder: Path
    server: ApiServer
    simulator: Simulator
    proxy: Proxy
    zygote: Zygote
    operators: list[Operator] = field(default_factory=list)
    _names: Any = field(default_factory=lambda: itertools.count(1))

    def operator(self, name: str = "operator-0", **settings: Any) -> Operator:
        """Another operator, which has the chart's rights and reaches the server by the proxy."""
        file = self.folder / "operator.conf"
        access.kubeconfig(self.server, self.proxy.url, file)
        made = Operator(
            self.zygote, self.folder, file, self.simulator.heads_url, settings, name=name
        )
        self.operators.append(made)
        return made

    def release(self) -> None:
        """Takes the Lease away, as if the time of a holder that is dead had passed."""
        self.simulator.delete(access.LEASE)

    def world(self, prefix: str) -> World:
        """A namespace of its own."""
        return World(self.server, self.simulator, f"{prefix}-{next(self._names)}")

    def calm(self) -> None:
        """No harm, and the time as it is."""
        self.proxy.clear()
        self.simulator.heads.before = self.simulator.heads.after = None
        self.zygote.set_clock(0.0)

    def clear(self) -> None:
        """No harm, and no operator."""
        self.calm()
        while self.operators:
            self.operators.pop().stop()
        self.release()


@contextlib.contextmanager
def standing(folder: Path) -> Iterator[Stand]:
    """Raises Unavailable where an API server cannot run."""
    with contextlib.ExitStack() as ends:
        server = definitions.serving(folder / "server")
        ends.callback(server.stop)
        simulator = Simulator(server)
        ends.callback(simulator.stop)
        proxy = Proxy(server, folder)
        ends.callback(proxy.stop)
        zygote = Zygote(folder)
        ends.callback(zygote.stop)
        stand = Stand(folder, server, simulator, proxy, zygote)
        ends.callback(stand.clear)
        yield stand
