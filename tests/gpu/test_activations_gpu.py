"""On a GPU: train.activations changes no bit of a loss or a gradient, with tiles and without, with each kernel, through real copies
to the host."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.tests.support.activation_cases import PLAIN, POLICIES, RICH, Step, batch, model, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(600)]
ROWS = 700
DOCUMENTS = [0, 130, 131, 420, 690]                         # the last ten rows see nothing
LAYERS = (Mask(cu_seqlens=DOCUMENTS), Mask(window_size=(60, 0), cu_seqlens=DOCUMENTS))
SIZES = dict(dim=256, num_heads=4, num_kv_heads=2, ffn_dim=384, loss_chunk_rows=256)
CONFIGS = {"D=64": dataclasses.replace(PLAIN, **SIZES, head_dim=64), "D=128": dataclasses.replace(PLAIN, **SIZES, head_dim=128),
           "sinks, softcap, qk_norm, tied": dataclasses.replace(RICH, **SIZES, head_dim=128)}
CHUNK_BYTES = 1 << 16                                       # many for each tensor


def steps_of(policy: str, config, kernel: str, tile_rows: int, device: torch.device) -> list[Step]:
    """Two steps of one model: the second finds the store's chunks of the first."""
    made = model(config, kernel=kernel, activations=policy, tile_rows=tile_rows, deterministic=True).to(device)
    made.store.chunk_bytes = CHUNK_BYTES
    layout = Layout("contiguous", ROWS, 1, LAYERS)
    tokens, labels = (x.to(device) for x in batch(ROWS))
    found = []
    for _ in range(2):
        made.zero_grad(set_to_none=True)
        found.append(step(made, tokens, torch.arange(ROWS, device=device), labels, layout, bf16=True))
    has_copied = policy == "offload" and device.type == "cuda"
    assert (made.store.num_chunks > config.num_layers) == has_copied, "pinned chunks are taken by offload, and by it alone"
    return found


@pytest.mark.parametrize("tile_rows", [0, 256, 1024], ids=["all rows", "three tiles", "one tile"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_every_policy_gives_the_same_bits(kernel, config, tile_rows):
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        dispatch.select(kernel, device=device, dtype=torch.bfloat16, head_dim=config.resolved_head_dim, deterministic=True)
    except RuntimeError as reason:
        pytest.skip(str(reason))
    found = {policy: steps_of(policy, config, kernel, tile_rows, device) for policy in POLICIES}
    plain = found["none"][0]
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in plain.gradients.values())
    for policy, steps in found.items():
        assert [each.differs(plain) for each in steps] == [[], []], policy
