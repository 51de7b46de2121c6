"""Bytes per token of a Transformer's layers between forward and backward, and at work. No torch.

Formulas of one layer, in bytes per token; c is the itemsize of what the products read and write, r that of the residual stream:

    saved    none, in tiles        r dim + c (2 Hq D + 2 Hkv D) + 4 Hq       x, q, k, v, out, lse
             none                  + (r + 2 c) dim + 4 c ffn                 x after attention; two norms; gate, silu, up, product
             block                 r dim                                             x
             block_save_attention  r dim + c Hq D + 4 Hq                             x, out, lse
             offload               0 (the same in host memory), and twice that of one layer in flight
    at work  attention's backward  2 r dim + c (2 Hq + 2 Hkv) D + (4 + c) (Hq + 2 Hkv) D + 12 Hq
                                   dy, dx; dout, q, k, v; dq, dk, dv in fp32 and rounded; delta, and lse and delta for kernels
             norms and MLP         2 r dim + c Hq D, and of a tile (or of all rows) (2 r + 12) dim + 6 c ffn

What is saved already is not counted again at work: see working_bytes. Held against the live bytes of a step that no kernel adds
to: within 3%.
"""
from __future__ import annotations

from dataclasses import dataclass

# From what needs most memory and least work to the opposite. `block` is not among them: it runs the ring's forward again, and ranks
# with unequal memory, which choose for themselves, must not differ in their messages.
CHOICES = ("none", "block_save_attention", "offload")
USABLE = 0.92  # of the device: the allocator's gaps, the context, NCCL


@dataclass(frozen=True)
class LayerSizes:
    """Of one layer. itemsize: of what the products read and write; residual_itemsize: of the sum that runs through the layers."""

    dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2
    residual_itemsize: int = 4

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """K and V."""
        return 2 * self.num_kv_heads * self.head_dim


def saved_bytes_per_token(sizes: LayerSizes, activations: str, *, is_tiled: bool) -> int:
    """Of one layer between its forward and its backward, on the device."""
    x, out = sizes.residual_itemsize * sizes.dim, sizes.itemsize * sizes.queries + 4 * sizes.num_heads
    if activations == "none":
        kept = x + out + sizes.itemsize * (sizes.queries + sizes.keys)
        return kept if is_tiled else kept + x + sizes.itemsize * (2 * sizes.dim + 4 * sizes.ffn_dim)
    return {"block": x, "block_save_attention": x + out, "offload": 0}[activations]


def host_bytes_per_token(sizes: LayerSizes, activations: str) -> int:
    """Of one layer between its forward and its backward, in pinned host memory."""
    return saved_bytes_per_token(sizes, "block_save_attention", is_tiled=True) if activations == "offload" else 0


def working_bytes(sizes: LayerSizes, activations: str, *, tokens: int, tile_rows: int) -> int:
    """The most that one layer's backward has on the device beyond what layers have saved, of `tokens` rows."""
    c, x, tile = sizes.itemsize, sizes.residual_itemsize * sizes.dim, min(tile_rows or tokens, tokens)
    wide, out = sizes.queries + sizes.keys, c * sizes.queries
    attention = x + out + (4 + c) * wide + 12 * sizes.num_heads
    rows, of_tile = 2 * x + out, 2 * x + 12 * sizes.dim + 6 * c * sizes.ffn_dim
    if activations == "none":
        # q, k, v are saved, and dy is gone by then.
        of_tile = of_tile if tile_rows else sizes.dim + 3 * c * sizes.ffn_dim
    else:
        attention += x + c * wide
    if activations == "block":
        # Attention is made again first, and waits for what follows it.
        again = out + 4 * sizes.num_heads
        attention, rows = attention + again, rows + again + c * wide
    # What the layer that computes has taken, and the one before it on its way.
    flying = 2 * host_bytes_per_token(sizes, activations) * tokens
    return flying + max(tokens * attention, tokens * rows + tile * of_tile)


def step_bytes(sizes: LayerSizes, activations: str, *, num_layers: int, tokens: int, tile_rows: int) -> int:
    """All layers' activations on the device at the peak of a step."""
    saved = saved_bytes_per_token(sizes, activations, is_tiled=tile_rows > 0)
    return num_layers * tokens * saved + working_bytes(sizes, activations, tokens=tokens, tile_rows=tile_rows)


def choose_activations(sizes: LayerSizes, *, num_layers: int, tokens: int, tile_rows: int, state_bytes: int,
                       device_bytes: int) -> str:
    """The first of CHOICES whose step fits a device of device_bytes beside state_bytes (weights, gradients, optimizer state);
    where none does, the last."""
    for activations in CHOICES:
        needed = step_bytes(sizes, activations, num_layers=num_layers, tokens=tokens, tile_rows=tile_rows)
        if state_bytes + needed <= USABLE * device_bytes:
            return activations
    return CHOICES[-1]
