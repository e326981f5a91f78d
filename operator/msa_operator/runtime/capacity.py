"""Where nodes come from: a protocol, and the provider that makes none.

A provider that makes something outside the job's namespace says so in what it observes; the
finalizer is then set before anything is made.
"""

from __future__ import annotations

from typing import Protocol

from msa_operator.reconcile.desired import Owner
from msa_operator.reconcile.observe import Capacity, State


class Provider(Protocol):
    """Nodes for one job after another. Calls may be repeated without harm."""

    def observe(self, state: State, owner: Owner) -> Capacity:
        """What of the job's lies outside its namespace, and whether it is ready for pods."""
        ...

    def prepare(self, state: State, owner: Owner) -> None:
        """Make what the nodes need."""
        ...

    def give_back(self, name: str, owner: Owner) -> None:
        """Give back one thing that :meth:`observe` lists as held."""
        ...


class ExistingNodes:
    """Pods go where the scheduler puts them: nodes that exist, or that waiting pods bring."""

    def observe(self, state: State, owner: Owner) -> Capacity:
        del state, owner
        return Capacity()

    def prepare(self, state: State, owner: Owner) -> None:
        """Nothing has to be made."""

    def give_back(self, name: str, owner: Owner) -> None:
        raise LookupError(f"{name} of {owner.name} was not made here")
