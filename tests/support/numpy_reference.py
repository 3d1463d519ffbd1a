"""DeepSeek-MoE-16B and XVERSE-MoE from their Hugging Face tensors, in plain NumPy.

Both are remote-code models that `transformers` lacks. Written from their published
descriptions (families.md, DeepSeekMoE arXiv 2401.06066), one token and one expert at a
time, in float64, sharing no code with the library.
"""

import numpy as np


def logits(tensors: dict[str, np.ndarray], hf: dict, tokens: list[int]) -> np.ndarray:
    """Logits `[S, V]` of one sequence."""
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    x = t["model.embed_tokens.weight"][tokens]
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        x = x + _attention(t, hf, p, _norm(x, t[p + "input_layernorm.weight"], hf))
        h = _norm(x, t[p + "post_attention_layernorm.weight"], hf)
        if layer < hf.get("first_k_dense_replace", 0):
            x = x + _mlp(t, p + "mlp.", h)
        else:
            x = x + _experts(t, hf, p + "mlp.", h)
    return _norm(x, t["model.norm.weight"], hf) @ t["lm_head.weight"].T


def _norm(x, weight, hf):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * weight


def _attention(t, hf, p, x):
    heads = hf["num_attention_heads"]
    S = len(x)
    width = t[p + "self_attn.q_proj.weight"].shape[0] // heads
    q, k, v = (
        (x @ t[f"{p}self_attn.{name}_proj.weight"].T).reshape(S, heads, width)
        for name in "qkv"
    )
    angles = np.outer(
        np.arange(S), hf["rope_theta"] ** (-np.arange(0, width, 2) / width)
    )
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turn(y):
        a, b = y[..., : width // 2], y[..., width // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turn(q), turn(k)
    out = np.zeros_like(q)
    for s in range(S):
        for head in range(heads):
            scores = k[: s + 1, head] @ q[s, head] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[s, head] = weights / weights.sum() @ v[: s + 1, head]
    return out.reshape(S, -1) @ t[p + "self_attn.o_proj.weight"].T


def _mlp(t, p, x):
    gate = x @ t[p + "gate_proj.weight"].T
    up = x @ t[p + "up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ t[p + "down_proj.weight"].T


def _experts(t, hf, p, x):
    xverse = hf["model_type"] == "xverse"
    router = t[p + ("router.weight" if xverse else "gate.weight")]
    top_k = hf["moe_top_k"] if xverse else hf["num_experts_per_tok"]
    out = np.zeros_like(x)
    for s, row in enumerate(x):
        score = np.exp(router @ row - (router @ row).max())
        score /= score.sum()
        chosen = np.argsort(-score)[:top_k]
        weights = score[chosen]
        if hf["norm_topk_prob"]:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            out[s] += weight * _mlp(t, f"{p}experts.{expert}.", row[None])[0]
    return out + _mlp(t, p + "shared_experts.", x)
