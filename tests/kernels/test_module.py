"""The attention layer: equal to its parts, with rotation, normalisation and documents."""

from __future__ import annotations

import pytest
import torch
from msa_kernels.attention import msa_attention
from msa_kernels.backend import BackendError
from msa_kernels.module import MsaAttention, rotate
from msa_kernels.pattern import BlockTopK, Documents, SinkWindow, Window
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def rotary(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    rate = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(length).float(), rate).repeat(1, 2)
    return angle.cos(), angle.sin()


def test_rotation_is_that_of_llama() -> None:
    x, (cos, sin) = torch.randn(2, 9, 3, 16), rotary(9, 16)
    wanted, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos[None], sin[None])
    torch.testing.assert_close(rotate(x, cos, sin), wanted.transpose(1, 2))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_layer_is_its_parts(qk_norm: bool) -> None:
    pattern = SinkWindow(6, 2)
    layer = MsaAttention(32, 4, pattern, kv_heads=2, qk_norm=qk_norm, bias=True)
    x, (cos, sin) = torch.randn(2, 40, 32), rotary(40, 8)
    out = layer(x, rotary=(cos, sin), documents=Documents((15, 25)))
    q, k = layer.q_proj(x).view(2, 40, 4, 8), layer.k_proj(x).view(2, 40, 2, 8)
    v = layer.v_proj(x).view(2, 40, 2, 8)
    if qk_norm:
        assert isinstance(layer.q_norm, torch.nn.RMSNorm)
        q, k = layer.q_norm(q), layer.k_norm(k)
    heads = msa_attention(
        rotate(q, cos, sin), rotate(k, cos, sin), v, pattern, documents=Documents((15, 25))
    )
    assert isinstance(heads, torch.Tensor)
    torch.testing.assert_close(out, layer.o_proj(heads.flatten(2)))
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 3"):
        MsaAttention(32, 4, Window(4), kv_heads=3)
    with pytest.raises(ValueError, match="does not divide by 5"):
        MsaAttention(32, 5, Window(4))
    with pytest.raises(BackendError, match="BlockTopK"):
        MsaAttention(32, 4, BlockTopK(8, 2))
    with pytest.raises(ValueError, match="kv_heads must be at least 1, found 0"):
        MsaAttention(32, 4, Window(4), kv_heads=0)
    with pytest.raises(BackendError, match="no backend 'nope'; choose auto"):
        MsaAttention(32, 4, Window(4), backend="nope")


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer, x = MsaAttention(32, 4, Window(4)), torch.randn(2, 9, 32)
    with pytest.raises(ValueError, match=r"\(batch, sequence, hidden\), found \(9, 32\)"):
        layer(x[0])
    cos, sin = rotary(9, 8)
    for some in (rotary(1, 8), rotary(10, 8), rotary(9, 4), (cos, sin.expand(3, -1, -1))):
        with pytest.raises(ValueError, match=r"must be \(sequence, head size\) = \(9, 8\)"):
            layer(x, rotary=some)
    torch.testing.assert_close(
        layer(x, rotary=(cos[None], sin[None])), layer(x, rotary=(cos, sin))
    )
    with pytest.raises(ValueError, match="head size 5 is odd"):
        MsaAttention(32, 4, Window(4), head_dim=5)(x, rotary=rotary(9, 5))
