"""Floating-point operations that a model asks for, of which utilisation (MFU) is the share of a GPU's peak. No torch.
Note [What a step costs].

Convention: 6 x weights of matrix products x tokens + 12 x heads x head_dim x allowed pairs of each layer; forward and backward,
exact to the mask (causal, windows, chunks, documents). Embedding look-ups, norms and what is computed again in the backward count
nothing.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringflash.mask import Mask
from ringflash.work import Work

# Dense bf16 TFLOP/s of the data sheets, by a part of the name that CUDA gives the card; the first that fits counts.
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H200 NVL", 835.0), ("H800 PCIe", 756.0), ("H100", 989.0), ("H200", 989.0),
    ("H800", 989.0), ("A100", 312.0), ("A800", 312.0), ("B200", 2250.0), ("L40S", 362.0),
)


def peak_tflops(gpu: str) -> float | None:
    """Of a card by the name that CUDA gives it; None where it is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS if part in gpu), None)


def step_flops(matmul_parameters: int, tokens: int, *, num_heads: int, head_dim: int, layer_pairs: int) -> int:
    """Of one forward and backward. matmul_parameters: weights that every token is multiplied with, the head among them;
    layer_pairs: allowed (query, key) pairs, summed over layers and sequences."""
    return 6 * matmul_parameters * tokens + 12 * num_heads * head_dim * layer_pairs


class LayerPairs:
    """Allowed pairs of a sample, summed over num_layers layers, which have the masks in turn.

    masks: causal, without documents or prefixes: a row then sees as much whatever follows it, so a table by length serves every
    document. ValueError for others.
    """

    def __init__(self, masks: Sequence[Mask], num_layers: int, seq_len: int):
        if any(mask.window_size[1] > 0 or not (mask.causal or mask.window_size[1] == 0) or mask.cu_seqlens is not None
               or mask.prefix_lens is not None for mask in masks):
            raise ValueError(f"masks={tuple(masks)}: must be causal, without documents or prefixes")
        counts = [num_layers // len(masks) + (index < num_layers % len(masks)) for index in range(len(masks))]
        self._pairs = sum(count * Work([mask], seq_len).prefix for count, mask in zip(counts, masks))  # int64 [seq_len + 1]
        self.seq_len = seq_len

    def of(self, cu_seqlens: np.ndarray | None) -> int:
        """cu_seqlens [N + 1]: of the sample's documents; None: it is one."""
        lengths = np.array([self.seq_len]) if cu_seqlens is None else np.diff(cu_seqlens)
        return int(self._pairs[lengths].sum())
