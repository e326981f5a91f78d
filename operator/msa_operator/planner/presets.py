"""Model shapes known by name, as Hugging Face configs; values from the models' public configs."""

from __future__ import annotations

from typing import Any


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **fields,
    }


def _qwen3(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        **fields,
    }


_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Trains on two CPU cores in minutes. 260 tokens: 256 bytes, begin, end, padding, one spare.
    "tiny-llama": _llama(
        vocab_size=260,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65_536,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    ),
    "llama-3-8b": _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
    "llama-3.1-8b": _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_31_ROPE,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
    "llama-3.1-70b": _llama(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_31_ROPE,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        bos_token_id=151_643,
        eos_token_id=151_645,
    ),
    "qwen3-32b": _qwen3(
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        bos_token_id=151_643,
        eos_token_id=151_645,
    ),
}
