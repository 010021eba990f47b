"""A Llama whose weights are written by hand, so that what a patch does is known on paper: an induction circuit.

Sixteen tokens. The stream has three spaces of sixteen numbers, for a token, for the one before it and for what comes next,
and one number that is always 1. MLPs are zero. Both layers have two heads:

    0.0  previous token: looks one position back and writes that token into "before"
    0.1  copy: looks at its own position and writes its token into "next", weakly
    1.0  induction: looks for positions whose "before" is its own token, and writes the token there into "next"
    1.1  nothing

Rotary embedding turns the first pair of a head's numbers by 1 a position, and the pairs from the eighth on by next to
nothing. So a score that depends on the distance stands in the first, and one that does not in the others.

Source: induction heads, Olsson et al. 2022 (arXiv:2209.11895).
"""

from __future__ import annotations

import math
from pathlib import Path

TOKENS, SIZE, WIDTH = 16, 32, 64  # of the vocabulary, of a head, of the stream
TOKEN, BEFORE, NEXT, ONE = 0, 16, 32, 48  # where the spaces begin
SHARP, COPIED = 60.0, 0.1  # scores; what the copy head adds


def induction(folder: Path) -> str:
    """Writes the checkpoint, with a tokenizer of words w3 … w15."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..models import with_words

    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=SIZE, max_position_embeddings=64, rms_norm_eps=1e-12, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12}, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    net = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weights in net.named_parameters():
            weights.fill_(1.0 if "norm" in name else 0.0)
        for token in range(TOKENS):
            net.model.embed_tokens.weight[token, TOKEN + token] = 1
            net.lm_head.weight[token, NEXT + token] = 1
        net.model.embed_tokens.weight[:, ONE] = 1
        first, second = (layer.self_attn for layer in net.model.layers)
        _look_back(first, 0, 1)
        _move(first, 0, TOKEN, BEFORE, 1.0)
        _look_back(first, 1, 0)
        _move(first, 1, TOKEN, NEXT, COPIED)
        _match(second, 0, TOKEN, BEFORE)
        _move(second, 0, TOKEN, NEXT, 1.0)
    net.save_pretrained(folder)
    with_words(str(folder), TOKENS)
    return str(folder)


def _look_back(attention, head: int, distance: int) -> None:
    """A head that attends `distance` positions back: its query is turned by so much, score = cos(difference)."""
    first, second = head * SIZE, head * SIZE + SIZE // 2  # rotary pairs are (i, i + E/2)
    # a query at t turned by −distance meets the key at t − distance without an angle between them
    attention.q_proj.weight[first, ONE] = SHARP * math.cos(distance)
    attention.q_proj.weight[second, ONE] = -SHARP * math.sin(distance)
    attention.k_proj.weight[first, ONE] = 1


def _match(attention, head: int, query: int, key: int) -> None:
    """A head whose score is whether the token in one space is that in the other."""
    for token in range(TOKENS):
        place = head * SIZE + (8 + token if token < 8 else SIZE // 2 + token)
        attention.q_proj.weight[place, query + token] = SHARP
        attention.k_proj.weight[place, key + token] = 1


def _move(attention, head: int, source: int, target: int, factor: float) -> None:
    """A head that writes what stands in one space of the attended position into another one."""
    for token in range(TOKENS):
        attention.v_proj.weight[head * SIZE + token, source + token] = 1
        attention.o_proj.weight[target + token, head * SIZE + token] = factor
