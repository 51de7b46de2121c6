"""Tiny random models of transformers, with what makes each family another case for attention; and their own attention."""
from __future__ import annotations

import copy

import torch

VOCAB = 61
_SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_MIXED = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_MOE = dict(num_local_experts=4, num_experts_per_tok=2)
# model_type -> what its configuration says beyond the sizes.
FAMILIES = {
    "arcee": {}, "gemma2": dict(_MIXED, attn_logit_softcapping=2.0, query_pre_attn_scalar=5), "gemma3_text": _MIXED, "glm4": {},
    "gpt_oss": dict(_MIXED, **_MOE), "granite": dict(attention_multiplier=0.4, logits_scaling=3.0), "llama": {},
    "mistral": dict(sliding_window=7), "mixtral": dict(_MOE, sliding_window=5), "olmo2": {},
    "phi3": dict(sliding_window=9), "qwen2": dict(_MIXED, use_sliding_window=True), "qwen3": {},
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), "smollm3": {},
    "starcoder2": dict(sliding_window=5),
}


def config_of(kind: str, **changes):
    """The configuration of a tiny `kind`, for its own eager attention."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**_SIZES, **FAMILIES[kind], **changes}, attn_implementation="eager")


def model_of(config, seed: int = 0):
    """Random weights, large enough that attention is not flat; fp32, in training mode, with a configuration object of its own."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    return model.train()


def restarting(cu_seqlens: list[int]) -> torch.Tensor:
    """int64 [1, S]: positions that begin again in every document, by which transformers itself tells documents apart."""
    return torch.cat([torch.arange(stop - start) for start, stop in zip(cu_seqlens, cu_seqlens[1:])])[None]


def dense_masks(config, cu_seqlens: list[int]) -> dict[str, torch.Tensor]:
    """Of each kind of layer, fp32 [1, 1, S, S] that is added to the scores."""
    at = torch.arange(cu_seqlens[-1])
    document = torch.bucketize(at, torch.tensor(cu_seqlens), right=True)
    full = (at[:, None] >= at) & (document[:, None] == document)
    allowed = {"full_attention": full, "sliding_attention": full & (at[:, None] - at < config.sliding_window)}
    return {kind: torch.where(mask, 0.0, float("-inf"))[None, None] for kind, mask in allowed.items()}


def own_attention(model, tokens, labels, cu_seqlens: list[int], num_items: int) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of a model with transformers' eager attention on whole packed documents. labels: shifted."""
    assert model.config._attn_implementation == "eager"
    model.zero_grad(set_to_none=True)
    # Most of them tell documents apart by positions that restart.
    mask = dense_masks(model.config, cu_seqlens) if model.config.model_type == "gpt_oss" else None
    loss = model(input_ids=tokens, position_ids=restarting(cu_seqlens), labels=labels, shift_labels=labels,
                 num_items_in_batch=num_items, use_cache=False, attention_mask=mask).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    """By name; of what got none, zeros (an expert that no token went to)."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
