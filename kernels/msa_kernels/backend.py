"""Backends: which implementation runs a call, why the others do not, and what has run.

Two kinds exist. A tile kernel (:class:`msa_kernels.plan.TileKernel`) computes one part at a time
under the engine, which merges parts and owns the gradient. A :class:`Direct` implementation is a
differentiable PyTorch function of the whole call. ``auto`` takes the first of :func:`preference`
that serves the request on its device; a named backend serves or raises :class:`BackendError`.

Optional packages that are missing, or that fail as they load, are asked once and then remembered.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from msa_kernels.capabilities import LIMITS
from msa_kernels.pattern import Pattern
from msa_kernels.placement import Placement
from msa_kernels.plan import Request, TileKernel

logger = logging.getLogger(__name__)


class BackendError(ValueError):
    """No implementation serves the request; the message says why each one refuses.

    ``reasons`` has them by backend name, where backends were asked.
    """

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or {}


class Direct(ABC):
    """A differentiable function of the whole call."""

    name: str

    @abstractmethod
    def refuses(self, request: Request) -> str | None:
        """None when this implementation serves the request, else the reason in one sentence."""

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern,
        placement: Placement, scale: float, return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Output (B, Sq, Hq, D) and, when asked for, natural-log LSE (B, Hq, Sq) fp32."""


Backend = TileKernel | Direct


def _triton() -> Backend:
    return importlib.import_module("msa_kernels.triton").kernel()


def _triton_fused() -> Backend:
    return importlib.import_module("msa_kernels.triton").kernel(fused=True)


def _triton_fp8() -> Backend:
    return importlib.import_module("msa_kernels.triton").kernel(fp8=True)


def _sdpa() -> Backend:
    from msa_kernels.sdpa import Sdpa

    return Sdpa()


def _flex() -> Backend:
    from msa_kernels.flex import Flex

    return Flex()


def _torch() -> Backend:
    from msa_kernels.tiled import TorchTiles

    return TorchTiles()


def _fa4() -> Backend:
    from msa_kernels.fa4 import FlashAttention4

    return FlashAttention4()


def _cudnn() -> Backend:
    from msa_kernels.cudnn import CudnnIntervals

    return CudnnIntervals()


LOADERS: dict[str, Callable[[], Backend]] = {
    "fa4": _fa4,
    "cudnn": _cudnn,
    "triton": _triton,
    "sdpa": _sdpa,
    "flex": _flex,
    "torch": _torch,
    "triton-fused": _triton_fused,
    "triton-fp8": _triton_fp8,
}
# One that is added says there what it serves: plans and jobs know of no other.
assert LOADERS.keys() == LIMITS.keys()
OPTIONAL = tuple(name for name, limits in LIMITS.items() if limits.package)
"""Backends that another package brings."""
OURS = ("triton", "triton-fused", "triton-fp8")
"""Backends that are the project's own kernels, which need a GPU."""
SHORT = 1024
"""Rows below which cuDNN through SDPA is the fastest dense attention on an H200 (measured:
benchmarks/kernels/h200.json)."""
FEW_TOKENS = 16384
"""Queries of a call below which cudnn-frontend's host time (about 1.4 ms for a forward and a
backward on the same machine) is more than what its kernels save."""


def preference(request: Request) -> tuple[str, ...]:
    """What ``auto`` tries, the fastest first where measurements say so.

    On a CPU the tiled torch implementation alone: as fast as SDPA on dense attention, and exact on
    every pattern. flash-attn-4 and cudnn-frontend reach 1.1 to 1.2 times our kernels on what they
    serve, the first on dense attention and windows, the second on sinks and block lists; on unions
    with a dilated part, which neither serves in one call, ours are the fastest, and on Hopper for
    head sizes above 128, forward and backward together, on tensors that TMA serves. Deterministic
    backwards of cudnn-frontend wait for one another, ours do not.
    """
    if request.device.type != "cuda":
        return ("torch",)
    if request.q_rows < SHORT:
        return ("sdpa", "fa4", "triton", "cudnn", "flex", "torch")
    if request.deterministic or request.batch * request.q_rows < FEW_TOKENS:
        return ("fa4", "triton", "cudnn", "sdpa", "flex", "torch")
    if request.head_dim > 128 and is_hopper(request.device):
        return ("triton", "fa4", "cudnn", "sdpa", "flex", "torch")
    return ("fa4", "cudnn", "triton", "sdpa", "flex", "torch")


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels' GPU is there: an H100 or H200."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True)
class Used:
    """One kind of call that ran: for logs and for a run's report."""

    backend: str
    pattern: str
    device: str
    dtype: str
    q_rows: int
    k_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    packed: bool
    calls: int


def load(name: str) -> Backend:
    """The backend of that name; ImportError when what it needs is not installed."""
    if name not in _loaded:
        try:
            _loaded[name] = LOADERS[name]()
        except ImportError as error:
            # Remembered: looking for a package that is not there costs milliseconds on every call.
            _loaded[name] = str(error)
        except Exception as error:
            if name not in OPTIONAL:
                raise
            _loaded[name] = f"it fails as it loads: {type(error).__name__}: {error}"
    found = _loaded[name]
    if isinstance(found, str):
        raise ImportError(found)
    return found


_loaded: dict[str, Backend | str] = {}
"""Backends, or why they cannot be loaded."""


@torch.compiler.assume_constant_result
def preload() -> bool:
    """Load what calls on this machine may use, while a graph is traced: an import cannot be.

    Not before: whoever imports this package may want to choose devices or to fork afterwards, and
    asking PyTorch for a GPU settles both.
    """
    for name in LOADERS:
        if name not in (*OPTIONAL, *OURS) or torch.cuda.is_available():
            with contextlib.suppress(ImportError):
                load(name)
    return True


def refusal(name: str, request: Request) -> str | None:
    """Why this backend does not serve the request, or None when it does."""
    try:
        return load(name).refuses(request)
    except ImportError as error:
        return f"cannot be loaded: {error}"


def resolve(request: Request, backend: str = "auto") -> Backend:
    """The implementation that runs ``request``; raises :class:`BackendError` with all reasons."""
    if torch.compiler.is_compiling():
        return _resolve(request, backend)  # A lock cannot be traced, and tracing happens once.
    # The answer holds as long as the same backends are loaded.
    key = (request, backend, *map(id, _loaded.values()))
    with _lock:
        known = None if request.places else _resolved.get(key)
    if known is not None:
        return load(known)
    chosen = _resolve(request, backend)
    with _lock:
        _resolved[key] = chosen.name
        while len(_resolved) > RESOLVED_KEPT:
            _resolved.popitem(last=False)
    return chosen


def tile_kernel(request: Request, backend: str = "auto") -> TileKernel:
    """Like :func:`resolve` among tile kernels: those that an operator can run."""
    if backend == "auto":
        for name in preference(request):
            if refusal(name, request) is None and not isinstance(load(name), Direct):
                backend = name
                break
    chosen = resolve(request, backend)
    if isinstance(chosen, Direct):
        raise BackendError(f"{chosen.name} computes whole calls only: it is no tile kernel")
    return chosen


def check_name(backend: str) -> None:
    """Raise :class:`BackendError` for a name that no backend has."""
    if backend != "auto" and backend not in LOADERS:
        raise BackendError(f"no backend {backend!r}; choose auto, {', '.join(LOADERS)}")


def _resolve(request: Request, backend: str) -> Backend:
    check_name(backend)
    tried = preference(request) if backend == "auto" else (backend,)
    reasons: dict[str, str] = {}
    for name in tried:
        reason = refusal(name, request)
        if reason is None:
            return load(name)
        reasons[name] = reason
    order = dict.fromkeys((*preference(request), *LOADERS))
    works = [n for n in order if n not in reasons and refusal(n, request) is None]
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    nearest = f"backend={works[0]!r} serves it" if works else "no other backend serves it either"
    raise BackendError(f"{_describe(request)} is refused. {said}. Nearest: {nearest}.", reasons)


def record(
    name: str, q: torch.Tensor, k: torch.Tensor, pattern: Pattern, packed: bool
) -> None:  # fmt: skip
    """Count a call, and log the first of its kind."""
    key = Used(
        name, _brief(pattern), str(q.device), str(q.dtype).split(".")[-1], q.shape[1], k.shape[1],
        q.shape[2], k.shape[2], q.shape[3], packed, 0,
    )  # fmt: skip
    with _lock:
        if key not in _calls and len(_calls) >= SHAPES_KEPT:
            key = replace(key, q_rows=0, k_rows=0)  # as of decoding, where every length is new
        _calls[key] += 1
        first = _calls[key] == 1
    if first:
        logger.info("attention runs on %s", key)


def used() -> list[Used]:
    """What has run in this process since :func:`reset`, the most frequent first. After
    :data:`SHAPES_KEPT` different shapes other lengths are counted together, as of 0 rows.

    Under ``torch.compile`` tile kernels are counted at each call and direct implementations,
    which become part of the compiled graph, are not.
    """
    with _lock:
        return [
            Used(**{**key.__dict__, "calls": count}) for key, count in _calls.most_common()
        ]  # fmt: skip


def reset() -> None:
    """Forget what has run."""
    with _lock:
        _calls.clear()


RESOLVED_KEPT = 1024
SHAPES_KEPT = 256
_resolved: OrderedDict[Hashable, str] = OrderedDict()
_calls: Counter[Used] = Counter()
_lock = threading.Lock()


def _describe(request: Request) -> str:
    heads = f"{request.q_heads}/{request.kv_heads} heads of {request.head_dim}"
    rows = f"{request.q_rows} queries on {request.k_rows} keys"
    dtype = str(request.dtype).split(".")[-1]
    packed = "" if request.plain else ", packed documents or shifted positions"
    return f"{_brief(request.pattern)}, {rows}, {heads}, {dtype} on {request.device}{packed}"


@lru_cache(maxsize=256)
def _brief(pattern: Pattern) -> str:
    text = str(pattern)
    return text if len(text) <= 120 else f"{text[:117]}..."
