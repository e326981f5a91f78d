"""Which kernel computes a rank's part of a call, and what all ranks must know of that choice.

Ranks choose apart, since what a kernel serves depends on the rank's own stretches of the sequence.
What others depend on is agreed upon before anything travels, once for each kind of call: that all
ranks have a kernel, and in which dtype gradients return.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msa_kernels import backend as backends
from msa_kernels.capabilities import LIMITS
from msa_kernels.engine import HeadGroup, head_groups
from msa_kernels.pattern import Pattern
from msa_kernels.plan import Request, TileKernel
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from msa_workloads.context.rankplan import Fuse, RankPlan

if TYPE_CHECKING:
    from msa_workloads.context.attention import ContextPlan, Options

T = TypeVar("T")
Groups = list[tuple[HeadGroup, RankPlan]]

AGREED_KEPT = 4096
"""Agreements remembered for each process group. Ranks remember and forget them in the order of
their calls, the same on all of them; plans, which threads share, come and go in another one."""


def choose(
    q: Tensor, k: Tensor, plan: ContextPlan, pattern: Pattern, options: Options, backend: str,
    return_lse: bool,
) -> tuple[Groups, TileKernel]:  # fmt: skip
    """The plan of every head group, and the kernel for all of them, of this rank.

    A kernel that rounds, its output or by the keys of a pass, serves no partial results. Where one
    is the fastest, or named, queries wait for all their keys: nothing is merged then. Those that
    need not wait are computed in the meantime only where more is received than the rank holds, as
    calls of their own cost more than a short exchange.
    """
    shared = list(head_groups(pattern, q.shape[2], k.shape[2]))

    def prepared(fuse: Fuse) -> Groups:
        some = replace(options, fuse=fuse)
        return [(group, plan.prepare(group.pattern, some)) for group in shared]

    def serving(groups: Groups) -> TileKernel:
        return tile_kernel([_request(q, k, part, return_lse) for _, part in groups], backend)

    if options.fuse == "auto" and options.method != "ring" and q.device.type == "cuda":
        whole = prepared("whole")
        kernel = serving(whole)
        if not _merges(kernel):
            most = max(part.most_received for _, part in whole)
            return whole if most <= plan.layout.rows else prepared("always"), kernel
    groups = prepared(options.fuse)
    return groups, serving(groups)


def _merges(kernel: TileKernel) -> bool:
    limits = LIMITS.get(kernel.name)
    return not getattr(kernel, "rounds", False) and (limits is None or limits.merges_passes)


def tile_kernel(requests: Sequence[Request], backend: str) -> TileKernel:
    """The tile kernel that serves all requests, those of a call's head groups.

    Raises :class:`msa_kernels.backend.BackendError` with every reason where there is none.
    """
    if backend != "auto" and backend not in backends.LOADERS:
        raise backends.BackendError(
            f"no backend {backend!r}; choose auto, {', '.join(backends.LOADERS)}"
        )
    reasons = []
    for name in backends.preference(requests[0]) if backend == "auto" else (backend,):
        said = [backends.refusal(name, request) for request in requests]
        reason = next((r for r in said if r), None)
        if reason is None:
            kernel = backends.load(name)
            if not isinstance(kernel, backends.Direct):
                return kernel
            reason = "computes whole calls only, without an LSE and delta from other ranks"
        reasons.append(f"{name}: {reason}")
    raise backends.BackendError(
        f"no tile kernel serves {requests[0].pattern} on {requests[0].device.type}: "
        f"{'; '.join(reasons)}. Nearest: backend='auto', in which torch serves every pattern"
    )


def _request(q: Tensor, k: Tensor, plan: RankPlan, return_lse: bool) -> Request:
    passes = [one for one in (plan.early, *plan.late) if one is not None]
    return Request(
        device=q.device, dtype=q.dtype, batch=q.shape[0], q_rows=q.shape[1], k_rows=k.shape[1],
        q_heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], pattern=plan.pattern,
        plain=False, needs_grad=True, return_lse=return_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(), partial=plan.split,
        places=tuple((one.queries, one.keys) for one in passes),
    )  # fmt: skip


def rounded(groups: Groups, kernel: TileKernel) -> bool:
    """Whether this rank's gradients of keys and values are in the dtype of q, whatever is asked
    for: nothing is lost where they travel so."""
    return getattr(kernel, "rounds", False) and not any(part.split for _, part in groups)


def agreed(
    find: Callable[[], T], holds: Callable[[T], bool], key: Hashable,
    groups: Sequence[dist.ProcessGroup],
) -> tuple[T, bool]:  # fmt: skip
    """What this rank finds, and whether ``holds`` says yes to what every rank of ``groups`` finds.

    Collective the first time that ``key``, the same on every rank, is met. An error of one rank
    is raised there, and as a :class:`msa_kernels.backend.BackendError` on all others. Each group
    is asked after the one before it: keys' groups and heads' groups reach all ranks of both.
    """
    key = (key, tuple(group.group_name for group in groups))
    with _lock:
        known = _agreed.setdefault(groups[0], OrderedDict()) if groups else OrderedDict()
        if key in known:
            known.move_to_end(key)
            return find(), known[key]
    found, error, text = None, None, None
    try:
        found = find()
    except Exception as problem:
        error, text = problem, f"rank {dist.get_rank() if groups else 0}: {problem}"
    level = 0 if error is not None else 1 + holds(found)  # type: ignore[arg-type]
    for group in groups:
        level = _least(level, group)
    if level == 0:
        for group in groups:
            texts: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(texts, text, group)
            text = next((some for some in texts if some), None)
        raise error or backends.BackendError(f"another rank cannot compute its part. {text}")
    with _lock:
        known[key] = level == 2
        while len(known) > AGREED_KEPT:
            known.popitem(last=False)
    return found, level == 2  # type: ignore[return-value]


def _least(value: int, group: dist.ProcessGroup) -> int:
    """The least value of a group's ranks; on the host where the group can, so that no rank has to
    wait for its device. No part of what is traced, counted or computed again."""
    kinds = {device.type for device in group._device_types}
    with _disable_current_modes():
        told = torch.tensor(value, device="cpu" if "cpu" in kinds else kinds.pop())
        dist.all_reduce(told, dist.ReduceOp.MIN, group)
        return int(told)


_agreed: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Hashable, bool]] = WeakKeyDictionary()
_lock = threading.Lock()
