"""A model of Hugging Face transformers behind the signature of Transformer, for the training loop."""
from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.hf_attention import attach, check_rows, decoder_layers
from ringflash.token_loss import TokenLoss

from .transformer import Attention, LossHead, ModelConfig


class HuggingFaceModel(nn.Module):
    """The decoder of `hf_config` (a configuration of transformers, left alone) with our loss over its output matrix.

    config     its sizes, of which the loss takes loss_chunk_rows and z_loss
    attention  attention(q, k, v, *, mask, layout, softmax_scale, ...) -> out, as ring_attention
    activations  none, or block: each layer keeps its input and is computed again in the backward, ring and all
    loss       chunked, or liger
    seed       weights are a function of (seed, module name): drawn as transformers draws them, the same on every rank

    Weights have transformers' names, but for the output matrix: `head.weight` here, `lm_head.weight` there. On the meta device
    nothing is drawn (call init_weights after to_empty).
    """

    def __init__(self, hf_config: Any, config: ModelConfig, attention: Attention, *, seed: int = 0, activations: str = "none",
                 loss: str = "chunked"):
        super().__init__()
        wants_meta = torch.empty(0).is_meta
        self.hf_config = hf_config
        causal_lm = _empty(hf_config)
        if getattr(causal_lm.lm_head, "bias", None) is not None:
            raise ValueError(f"model.hf: {type(causal_lm).__name__} has an output matrix with a bias, which the loss has not")
        attach(causal_lm, attention)
        if activations == "block":
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = causal_lm.base_model
        self.is_tied = causal_lm.lm_head.weight is causal_lm.get_input_embeddings().weight
        with torch.device("meta"):
            self.head = LossHead(config, loss)
        self.head.weight = causal_lm.lm_head.weight
        if not wants_meta:
            self.to_empty(device="cpu")
            if self.is_tied:
                # to_empty made two of it.
                self.head.weight = self.model.get_input_embeddings().weight
            self.init_weights(seed)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder's layers, in their order."""
        return decoder_layers(self.model)

    @torch.no_grad()
    def init_weights(self, seed: int, write: Callable[[Tensor, Tensor], None] = Tensor.copy_) -> None:
        """Draws every weight and fills the buffers (frequencies of RoPE). write(parameter, its value, whole and on the CPU) may
        keep a part of it. One module's weights exist at a time; torch's global generator is left alone."""
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        template = _empty(self.hf_config)
        for prefix, module in template.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if not own:
                continue
            module.to_empty(device="cpu", recurse=False)
            digest = hashlib.blake2b(f"{seed}/{prefix}".encode(), digest_size=7).digest()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest, "little"))
                template._init_weights(module)
            for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                here = ours(f"{prefix}.{name}")
                if here in parameters:
                    write(parameters[here], value)
                elif here in buffers:
                    buffers[here].copy_(value)
            module.to_empty(device="meta", recurse=False)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor | None = None, *, layout=None,
                reduction: str = "sum") -> Tensor | TokenLoss:
        """As Transformer.forward, but for S = 0, which modules of transformers cannot take."""
        if tokens.ndim != 2 or positions.shape != tokens.shape[1:]:
            raise ValueError(f"tokens [B, S] and positions [S] must share S, got {tuple(tokens.shape)}, {tuple(positions.shape)}")
        if labels is not None and labels.shape != tokens.shape:
            raise ValueError(f"labels must have the shape of tokens {tuple(tokens.shape)}, got {tuple(labels.shape)}")
        if layout is not None:
            check_rows(layout)
        hidden = self.model(input_ids=tokens, position_ids=positions[None].expand(len(tokens), -1), use_cache=False,
                            layout=layout).last_hidden_state
        return hidden if labels is None else self.head(hidden, labels, reduction)


def ours(theirs: str) -> str:
    """Our name of a weight of transformers' model."""
    return "head.weight" if theirs == "lm_head.weight" else theirs


def save_pretrained(folder: str | os.PathLike, hf_config: Any, state: dict[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """config.json and safetensors of a HuggingFaceModel's whole state_dict, by transformers itself; cast to dtype (None: as they
    are). Returns the number of parameters. RuntimeError for a state that is not this config's."""
    model = _empty(hf_config)
    theirs = {"lm_head.weight" if name == "head.weight" else name: value for name, value in state.items()}
    model.load_state_dict(theirs, assign=True)
    model.tie_weights()
    (model if dtype is None else model.to(dtype)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def pretrained(folder: str | os.PathLike) -> dict[str, Tensor]:
    """The weights of a folder by the names that transformers gives them in memory, whole, in the dtypes of the files. ValueError
    where transformers finds some missing or too many."""
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    wrong = {what: sorted(map(str, names))[:3] for what, names in told.items() if names and what != "error_msgs"}
    if wrong:
        raise ValueError(f"model.weights={folder}: {'; '.join(f'{what}: {names}' for what, names in wrong.items())}")
    return dict(model.named_parameters())


def _empty(hf_config: Any) -> nn.Module:
    """Its model for causal language modelling, fp32 on the meta device. ValueError where transformers has none."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), dtype=torch.float32)
