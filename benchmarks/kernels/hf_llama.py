"""Train a Hugging Face Llama with this attention, and the same model with FlexAttention.

    python benchmarks/kernels/hf_llama.py --out hf_llama.json

A few layers of a model of about a billion parameters' width, Window(4096), one sequence of 32,768
byte tokens of Python's own standard library per step, bf16, AdamW. Both start from the same
weights and read the same batches. Losses must agree within 1 %; times are medians of the steps
after the first five, in which kernels are compiled.
"""

from __future__ import annotations

import gc
import json
import statistics
import sysconfig
import time
from pathlib import Path

import arguments
import torch
import transformers
from msa_kernels import backend, hf
from msa_kernels.pattern import Window
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 4096
WARM = 5
IMPLEMENTATIONS = (*(f"msa:{name}" for name in ("auto", *backend.LOADERS)), "flex_attention")


def batches(length: int, steps: int) -> torch.Tensor:
    """Byte tokens (steps, 1, length) of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    count = steps * length
    assert len(text) >= count, f"the standard library has {len(text)} bytes, {count} are needed"
    return torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).view(steps, 1, length)


def build(implementation: str, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=32_768, attn_implementation=implementation, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def mask(name: str, length: int) -> object:
    """FlexAttention takes the window as a block mask, which transformers passes through."""
    if name != "flex_attention":
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b, h, i, j):
        return (j <= i) & (i - j < WINDOW)

    return create_block_mask(seen, None, None, length, length, device="cuda", _compile=True)


def train(name: str, data: torch.Tensor, layers: int) -> dict[str, object]:
    implementation, _, kernels = name.partition(":")
    model = build(implementation, layers)
    if implementation == hf.NAME:
        hf.set_patterns(model, Window(WINDOW), backend=kernels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    given = mask(name, data.shape[-1])
    losses, times = [], []
    backend.reset()
    torch.cuda.reset_peak_memory_stats()
    for batch in data:
        tokens = batch.cuda().long()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=tokens, attention_mask=given, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        losses.append(round(float(loss), 5))
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer, loss, given
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "implementation": name, "ran": sorted({used.backend for used in backend.used()}),
        "losses": losses, "step_ms": [round(t, 2) for t in times],
        "median_ms": round(statistics.median(times[WARM:]), 2), "peak_bytes": peak,
    }  # fmt: skip


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("hf_llama.json"),
                        help="the record, written after every implementation")  # fmt: skip
    parser.add_argument("--steps", type=arguments.number, default=20,
                        help="more than 5: the first five are not timed")  # fmt: skip
    parser.add_argument("--layers", type=arguments.number, default=4, help="of the model")
    parser.add_argument("--length", type=arguments.number, default=32_768, help="tokens of a step")
    parser.add_argument(
        "--implementations",
        type=arguments.names(IMPLEMENTATIONS),
        default="msa:auto,msa:triton,flex_attention",
        help="msa with a backend, or FlexAttention, which others are compared with",
    )
    args = parser.parse_args()  # fmt: skip
    if args.steps <= WARM:
        parser.error(f"--steps {args.steps}: the first {WARM} are not timed, so that none is left")
    arguments.needs_gpu(parser)
    hf.register()
    data = batches(args.length, args.steps)
    runs: list[dict] = []
    for name in args.implementations:
        runs.append(train(name, data, args.layers))
        print(
            name, runs[-1]["median_ms"], "ms a step, losses", runs[-1]["losses"][::5], flush=True
        )
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        found = {"card": torch.cuda.get_device_name(), "versions": versions, "runs": runs}
        found |= compare(runs)
        args.out.write_text(json.dumps(found, indent=1))


def compare(runs: list[dict]) -> dict[str, object]:
    """Largest relative difference of losses from FlexAttention's, and its time over ours."""
    flex = next((run for run in runs if run["implementation"] == "flex_attention"), None)
    if flex is None:
        return {}
    rows = {}
    for run in runs:
        if run is not flex:
            apart = (
                abs(a - b) / b for a, b in zip(run["losses"], flex["losses"], strict=True)
            )  # fmt: skip
            rows[run["implementation"]] = {
                "largest_loss_difference": round(max(apart), 5),
                "speedup": round(flex["median_ms"] / run["median_ms"], 4),
            }
    return {"against_flex_attention": rows}


if __name__ == "__main__":
    main()
