"""A plan as text for people and as plain values for programs."""

from __future__ import annotations

from typing import Any

from msa_operator.planner.hardware import GIB, memory_request_mib
from msa_operator.planner.request import Plan, degrees, place
from msa_operator.planner.runtime import THIS_VERSION


def to_dict(plan: Plan, pattern: Any = None) -> dict[str, Any]:
    """JSON-ready; memory in GiB, times in seconds, FLOPs plain."""
    rank = plan.rank
    out: dict[str, Any] = {
        "summary": plan.label,
        "machine": plan.machine.name,
        "machines": plan.machines,
        "degrees": {
            "tensor": plan.mesh.tensor,
            "context": plan.mesh.context,
            "dataShard": plan.mesh.data_shard,
            "dataReplicate": plan.mesh.data_replicate,
        },
        "worldSize": plan.mesh.world_size,
        "microBatch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "stepTokens": plan.step_tokens,
        "context": context(plan),
        "attentionBackend": plan.backend,
        "memorySwitches": switches(plan),
        "memoryGiB": {
            "peak": _gib(rank.total),
            "usable": _gib(plan.usable),
            "states": _gib(rank.states),
            "gathered": _gib(rank.gathered),
            "activations": _gib(rank.kept),
            "layerBackward": _gib(rank.working + rank.exchange),
            "logits": _gib(rank.logits),
            "process": _gib(rank.fixed),
            "host": _gib(rank.host),
        },
        "flops": {
            "step": plan.flops.model,
            "attentionShare": round(plan.flops.attention / plan.flops.model, 4),
            "recomputed": plan.flops.recompute_matrices + plan.flops.recompute_attention,
            "peak": _peak(plan),
        },
        "density": round(plan.density, 6),
        "estimate": None,
        "podResources": pod_resources(plan),
        "rejected": [{"plan": r.label, "reason": r.reason} for r in plan.rejected],
        "notes": list(plan.notes),
    }
    if plan.step_seconds is not None and plan.tokens_per_second is not None:
        price = plan.machine.dollars_per_hour
        out["estimate"] = {
            "stepSeconds": round(plan.step_seconds, 3),
            "tokensPerSecond": round(plan.tokens_per_second),
            "dollarsPerHour": None if price is None else round(price * plan.machines, 2),
        }
    if pattern is not None:
        missing = THIS_VERSION.missing(plan.mesh, plan.memory, pattern)
        out["notYetRunnable"] = list(missing)
    return out


def _peak(plan: Plan) -> float | None:
    """FLOP/s of all ranks together by the data sheet; None where nothing is known."""
    gpu = plan.machine.accelerator
    return None if gpu is None else gpu.peak_tflops * 1e12 * plan.mesh.world_size


def context(plan: Plan) -> dict[str, Any] | None:
    """How context ranks share a sequence; None where there is one."""
    if plan.mesh.context == 1:
        return None
    choice = plan.context
    return {
        "layouts": [
            {"layout": p.name, "balance": round(p.balance, 4), "receivedTokens": round(p.received)}
            for p in choice.layouts
        ],
        "method": choice.spec.method,
        "heads": choice.spec.heads,
        "reasons": list(choice.reasons),
    }


def switches(plan: Plan) -> list[str]:
    """The memory switches that are on, in words."""
    memory = plan.memory
    words = []
    if memory.checkpointing != "none":
        words.append(f"{memory.checkpointing} recomputation of layers")
    if memory.loss_chunk:
        words.append(f"loss in chunks of {memory.loss_chunk} tokens")
    if memory.mlp_chunk:
        words.append(f"MLP in tiles of {memory.mlp_chunk} tokens")
    if memory.offload_checkpoints:
        words.append("layer inputs offloaded to CPU memory")
    if memory.offload_optimizer:
        words.append("optimizer offloaded to CPU memory")
    return words


def efa(plan: Plan) -> int:
    """EFA interfaces that each worker pod requests: all of a machine's, when there are several."""
    return plan.machine.efa if plan.machines > 1 else 0


def pod_resources(plan: Plan) -> dict[str, int | str]:
    """What a worker pod requests of its node, one pod a machine; empty for a shared machine.

    Memory is the most that fits before daemonsets take their part.
    """
    if plan.machine.shared or plan.machine.accelerator is None:
        return {}
    gpus = min(plan.mesh.world_size, plan.machine.count)
    resources: dict[str, int | str] = {"nvidia.com/gpu": gpus}
    if interfaces := efa(plan):
        resources["vpc.amazonaws.com/efa"] = interfaces
    return resources | {"memory": f"{memory_request_mib(plan.machine)}Mi"}


def lines(plan: Plan) -> list[tuple[str, str]]:
    """Label and text of everything that explains the plan, without what was rejected."""
    mesh, rank = plan.mesh, plan.rank
    unit = "worker" if plan.machine.accelerator is None else "GPU"
    out = [
        ("where", place(plan.machine, plan.machines, mesh)),
        ("split", _split(plan)),
        (
            "step",
            f"{plan.step_tokens:,} tokens: {mesh.data_ranks} data ranks x micro-batch "
            f"{plan.micro_batch} x accumulation {plan.accumulation}",
        ),
        (
            "memory",
            f"{rank.total / GIB:.1f} GiB per {unit} at the peak, {plan.usable / GIB:.1f} usable "
            f"(states {rank.states / GIB:.1f}, gathered {rank.gathered / GIB:.1f}, activations "
            f"{rank.kept / GIB:.1f}, layer backward {(rank.working + rank.exchange) / GIB:.1f}, "
            f"logits {rank.logits / GIB:.1f})",
        ),
        *([("sequence", plan.context.text)] if plan.mesh.context > 1 else []),
        ("saved by", ", ".join(switches(plan)) or "nothing: everything fits as it is"),
        (
            "work",
            f"{plan.flops.model / 1e12:,.1f} TFLOP a step, "
            f"{plan.flops.attention / plan.flops.model:.0%} of it attention at "
            f"{plan.density:.1%} of dense",
        ),
    ]
    if plan.tokens_per_second is not None and plan.step_seconds is not None:
        text = f"about {plan.tokens_per_second:,.0f} tokens/s, {plan.step_seconds:.1f} s a step"
        if plan.machine.dollars_per_hour is not None:
            hourly = plan.machine.dollars_per_hour * plan.machines
            per_million = hourly / 3600 / plan.tokens_per_second * 1e6
            text += f", ${hourly:,.0f} an hour, ${per_million:,.2f} per million tokens"
        out.append(("estimate", text))
    if pod := pod_resources(plan):
        text = ", ".join(f"{name}: {value}" for name, value in pod.items())
        out.append(("worker pod", f"{text} (memory is the most that can be requested)"))
    out += [("note", note) for note in plan.notes]
    return out


def _split(plan: Plan) -> str:
    mesh = plan.mesh
    words = []
    for count, text in (
        (mesh.tensor, "tensor ranks"),
        (mesh.context, "context ranks"),
        (mesh.data_shard, "data ranks that share one copy of the states"),
        (mesh.data_replicate, "such copies"),
    ):
        if count > 1:
            words.append(f"{count} {text}")
    return f"{degrees(mesh)} ({' x '.join(words) or 'nothing is split'})"


def _gib(value: float) -> float:
    return round(value / GIB, 3)
