"""How a job is operated: capacity, network, checkpoints, failures, deadlines and cleaning up."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from msa_operator.api import values
from msa_operator.api.fields import Duration
from msa_operator.api.schema import Choice, Each, Int, Model, Rule, Text


class Reservation(Model):
    ids: Annotated[
        tuple[str, ...],
        Each(Text(64, r"^cr-[0-9a-f]{8,17}$", "a reservation id such as cr-0123456789abcdef0"),
             16, unique=True),
    ] = ()  # fmt: skip
    """Capacity reservations and capacity blocks that the job may use."""


class Capacity(Model):
    provisioner: Annotated[str, Choice(("Auto", "Existing", "Karpenter", "NodeGroup"))] = "Auto"
    """Who makes nodes for the job: nobody (Existing: nodes that are there, or that the cluster
    brings for waiting pods), Karpenter, or EKS node groups. Auto is the best that this version
    has, which is Existing; Karpenter and NodeGroup are refused on GPUs until they are built."""
    order: Annotated[
        tuple[str, ...], Each(Choice(("Reserved", "OnDemand", "Spot")), 3, unique=True)
    ] = ("Reserved", "OnDemand")
    """Kinds of capacity in the order in which they are tried, where nodes are made for the job."""
    reservation: Reservation = Field(default_factory=Reservation)

    rules: ClassVar = (
        Rule(
            "size(self.order) > 0",
            "order must name at least one kind of capacity",
            lambda c: len(c.order) > 0,
            "order",
            lambda c: "found an empty list",
            lambda c: "[OnDemand]",
        ),
        Rule(
            "size(self.reservation.ids) == 0 || self.order.exists(o, o == 'Reserved')",
            "reservation ids are used only when order names Reserved",
            lambda c: not c.reservation.ids or "Reserved" in c.order,
            "order",
            lambda c: f"found [{', '.join(c.order)}] with reservation ids",
            lambda c: f"[{', '.join(('Reserved', *c.order))}]",
        ),
    )


class Network(Model):
    efa: Annotated[str, Choice(("Auto", "Required", "Disabled"))] = "Auto"
    """Auto uses EFA for runs over several machines that have it; Required fails without it."""


class Checkpoint(Model):
    uri: Annotated[
        str | None,
        Text(1024, values.FOLDER, values.FOLDER_HELP,
             lambda found: values.nearest_uri(found, ("s3", "file"))),
    ] = None  # fmt: skip
    """Folder for checkpoints; default: beside the run's output, or what the cluster offers."""
    every_steps: Annotated[int, Int(1, 10**9)] = 100
    """Steps between checkpoints; the last step always has one."""
    keep: Annotated[int, Int(1, 1000)] = 3
    """Complete checkpoints kept, the newest ones."""
    resume: Annotated[Literal["Latest", "Never"], Choice(("Latest", "Never"))] = "Latest"
    """Latest goes on from the newest complete checkpoint; Never refuses a folder that has one."""


class Failure(Model):
    max_restarts: Annotated[int, Int(0, 1000)] = 5
    """Attempts after the first, whatever ended the one before."""
    on_node_loss: Annotated[
        tuple[str, ...], Each(Choice(("WaitReplacement", "Replan", "Fail")), 3, unique=True)
    ] = ("WaitReplacement", "Replan", "Fail")
    """What is tried, in this order, when a node is lost."""

    rules: ClassVar = (
        Rule(
            "!self.onNodeLoss.exists(a, a == 'Fail') || "
            "self.onNodeLoss[size(self.onNodeLoss) - 1] == 'Fail'",
            "nothing is tried after Fail: it must come last",
            lambda f: "Fail" not in f.on_node_loss[:-1],
            "onNodeLoss",
            lambda f: f"found [{', '.join(f.on_node_loss)}]",
            lambda f: f"[{', '.join((*(a for a in f.on_node_loss if a != 'Fail'), 'Fail'))}]",
        ),
    )


class Hang(Model):
    step: Duration = "30m"
    """A run without a step for this long is ended; its stacks lie beside the checkpoints."""


class Deadlines(Model):
    capacity: Duration = "30m"
    """Longest wait for nodes."""
    start: Duration = "15m"
    """Longest time from nodes ready to the first step."""
    active: Duration = "240h"
    """Longest time that the job may hold nodes."""


class Cleanup(Model):
    on_success: Annotated[str, Choice(("DeleteCluster", "KeepHead", "KeepCluster"))] = (
        "DeleteCluster"
    )
    """What happens to the Ray cluster of a job that is complete."""
    on_failure: Annotated[str, Choice(("DeleteCluster", "KeepHead", "KeepCluster"))] = "KeepHead"
    """What happens to that of a failed one: a head without workers keeps logs and dashboard."""
    after: Duration = "10m"
    """How long what is kept is kept; nodes are given back at once unless KeepCluster."""
    ttl: Duration = "7d"
    """When the finished job object itself is deleted."""
