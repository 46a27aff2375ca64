"""Rotary frequencies stay fp32 in models of every type."""

import copy
from collections.abc import Callable

import torch
from model_files import TINY, fair_esm, ours, tokenise
from torch import nn

from esmshard.model.attention import inverse_frequencies
from esmshard.model.families.esm2 import EsmConfig

CASTS: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.to(torch.device("cpu"), torch.float16),
    lambda m: copy.deepcopy(m.bfloat16().float()).half(),
    lambda m: nn.Sequential(m).bfloat16()[0],
]


def test_frequencies_stay_exact_whatever_the_model_is_cast_to() -> None:
    reference = fair_esm(TINY)
    expected = reference.layers[0].self_attn.rot_emb.inv_freq.clone()
    assert not torch.equal(expected, inverse_frequencies(TINY.head_dim)), "the file has other numbers"
    assert not torch.equal(expected, expected.bfloat16().float())
    for cast in CASTS:
        model = cast(ours(reference, TINY))
        for layer in model.layers:
            assert layer.fc1.weight.dtype != torch.float32
            assert torch.equal(layer.self_attn.rot_emb.inv_freq, expected)
        assert model.lm_head.weight is model.embed_tokens.weight


def test_bf16_is_near_fp32_at_a_thousand_residues_because_angles_are_fp32() -> None:
    """With large biases of queries and keys, attention depends on distances, as in trained models."""
    config = EsmConfig(n_layers=4, dim=64, n_heads=4)
    model, generator = ours(fair_esm(config), config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight /= 3
            for bias in (layer.self_attn.q_proj.bias, layer.self_attn.k_proj.bias):
                bias.copy_(torch.randn(bias.shape, generator=generator) * 2.5)
    _, batch = tokenise(["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRV" * 25])

    def last() -> torch.Tensor:
        with torch.no_grad():
            return model(batch).representations[config.n_layers].float()

    exact = last()
    model.bfloat16()
    assert torch.cosine_similarity(exact, last(), dim=-1).min() > 0.999
    for layer in model.layers:
        layer.self_attn.rot_emb.inv_freq = layer.self_attn.rot_emb.inv_freq.bfloat16().float()
    assert torch.cosine_similarity(exact, last(), dim=-1).min() < 0.999
