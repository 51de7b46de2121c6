"""What the compiler makes of the triton kernels for Hopper, seen without a GPU: tensor-core instructions, spills, shared memory.

A launch's own arguments are compiled for sm_90, so tile table, descriptors and specialisation are those of a run.
"""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from ringflash.kernels import triton_backward, triton_dq, triton_forward, triton_tiles  # noqa: E402
from ringflash.kernels.triton_support import INTERPRETED  # noqa: E402
from ringflash.tests.support.triton_compile import HOPPER, Build, build  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing is compiled")

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SHARED_LIMIT = {90: 227 << 10, 80: 163 << 10, 86: 99 << 10}

# Bytes of spill stores + loads per thread, by triton 3.6 and by 3.7 and later; absent: none. (kind, head_dim, descriptors), "+"
# for the variant that adds to its output, "c" for the one with a cap, "/" and head_dim_v where it differs. At D = 128 they lie in
# the masked loop and the epilogue.
SPILLS = {
    ("dkv", 128, True): (248, 24), ("dkv", 128, False): (180, 48), ("dkv+", 128, True): (396, 296),
    ("dkv", 256, True): (608, 584), ("dkv", 256, False): (692, 556), ("dkv+", 256, True): (784, 792),
    ("dq+", 256, True): (604, 600),
    ("forward", 256, True): (592, 560), ("forward", 256, False): (600, 984),
    ("backwardc", 64, True): (68, 0), ("dkvc", 128, True): (488, 168), ("dkv+c", 128, True): (644, 244),
    ("dkv/128", 192, True): (96, 24), ("dkv+/128", 192, True): (228, 228), ("dq+/128", 192, True): (416, 416),
}
SLACK = 32  # ptxas versions differ by a few bytes


def compile_kind(
    kind: str, head_dim: int, dtype: torch.dtype, tile: triton_tiles.Tile, target: GPUTarget = HOPPER, *,
    first: bool = False, last: bool = False, accumulate: bool = False, softcap: float = 0.0, head_dim_v: int | None = None,
) -> Build:
    rows, heads, kv_heads = 64, 2, 1
    dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    q, dout = (torch.zeros(1, rows, heads, d, dtype=dtype) for d in dims)
    dq, state = (torch.zeros(1, rows, heads, d) for d in dims)
    k, v = torch.zeros(rows, 1, kv_heads, sum(dims), dtype=dtype).transpose(0, 1).split(dims, -1)
    dk, dv = torch.zeros(rows, 1, kv_heads, sum(dims)).transpose(0, 1).split(dims, -1)
    bounds, lse = torch.zeros(rows, dtype=torch.int32), torch.zeros(1, heads, rows)
    if kind == "forward":
        launch = triton_forward.forward_launch(
            q, k, v, bounds, bounds, state, lse, dout if last else None, 0.125, softcap, first, tile)
        kernel = triton_forward.forward_kernel
    elif kind == "dq":
        launch = triton_dq.dq_launch(dout, q, k, v, lse, lse, bounds, bounds, dq, 0.125, softcap, accumulate, tile)
        kernel = triton_dq.dq_kernel
    else:
        launch = triton_backward.backward_launch(
            dout, q, k, v, lse, lse, bounds, bounds, dq if kind == "backward" else None, dk, dv, 0.125, softcap, accumulate, tile)
        kernel = triton_backward.backward_kernel
    _, arguments, options = launch
    return build(kernel, arguments, options, target)


def assert_sound(label: str, head_dim: int, tile: triton_tiles.Tile, made: Build) -> None:
    """label: as in SPILLS."""
    allowed = SPILLS.get((label, head_dim, tile.tma), (0, 0))[TRITON >= (3, 7)]
    assert made.wgmma > 0, "no dot became a wgmma"
    assert made.spill_bytes <= (allowed + SLACK if allowed else 0), f"{made.spill_bytes} bytes of spills, recorded {allowed}"
    assert made.shared <= SHARED_LIMIT[90]
    assert made.warnings == (), f"ptxas serialised wgmma: {made.warnings}"
    assert ("cp.async.bulk.tensor" in made.ptx) == tile.tma


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", triton_tiles.KINDS)
def test_hopper_kernels_use_wgmma_and_spill_no_more_than_recorded(kind, head_dim, tma):
    tile = triton_tiles.tile_for("hopper", head_dim, kind, torch.bfloat16)
    if kind == "backward" and tile.dq == "separate":
        pytest.skip(f"head_dim {head_dim} runs as dkv and dq")
    tile = replace(tile, tma=tma)
    made = compile_kind(kind, head_dim, torch.bfloat16, tile)
    assert_sound(kind, head_dim, tile, made)
    if kind == "backward":
        assert ("cp.reduce.async.bulk.tensor" in made.ptx) == tma
        assert bool(re.search(r"\b(red|atom)\.[\w.]*global[\w.]*add", made.ptx)) == (not tma)


@pytest.mark.parametrize("kind, head_dim, changes", [
    ("forward", 128, dict(first=True)), ("forward", 128, dict(first=True, last=True)), ("forward", 128, dict(last=True)),
    ("backward", 64, dict(accumulate=True)), ("dkv", 128, dict(accumulate=True)), ("dq", 128, dict(accumulate=True)),
    ("dkv", 256, dict(accumulate=True)), ("dq", 256, dict(accumulate=True)),
], ids=str)
def test_every_way_to_start_and_finish_compiles_as_well_in_fp16(kind, head_dim, changes):
    tile = triton_tiles.tile_for("hopper", head_dim, kind, torch.float16)
    label = kind + "+" if changes.get("accumulate") else kind
    assert_sound(label, head_dim, tile, compile_kind(kind, head_dim, torch.float16, tile, **changes))


def test_fp32_products_are_never_rounded_to_tf32():
    made = compile_kind("forward", 64, torch.float32, triton_tiles.tile_for("hopper", 64, "forward", torch.float32))
    assert "tf32" not in made.ptx and made.wgmma == 0 and "fma.rn" in made.ptx


@pytest.mark.parametrize("kind, head_dim, changes", [
    ("forward", 64, {}), ("backward", 64, {}), ("forward", 128, {}), ("dkv", 128, {}), ("dkv", 128, dict(accumulate=True)),
    ("dq", 128, {}), ("dq", 128, dict(accumulate=True)),
], ids=str)
def test_a_cap_costs_no_wgmma_and_few_spills(kind, head_dim, changes):
    tile = triton_tiles.tile_for("hopper", head_dim, kind, torch.bfloat16)
    label = kind + "+" * bool(changes) + "c"
    assert_sound(label, head_dim, tile, compile_kind(kind, head_dim, torch.bfloat16, tile, softcap=20.0, **changes))


@pytest.mark.parametrize("kind, head_dim, head_dim_v, changes", [
    ("forward", 192, 128, {}), ("forward", 192, 128, dict(softcap=20.0)), ("dkv", 192, 128, {}),
    ("dkv", 192, 128, dict(accumulate=True)), ("dq", 192, 128, {}), ("dq", 192, 128, dict(accumulate=True)),
    ("forward", 64, 128, {}), ("forward", 128, 64, {}),
    ("dkv", 64, 128, {}), ("dkv", 128, 64, {}), ("dq", 64, 128, {}), ("backward", 64, 32, {}),
], ids=str)
def test_a_value_dim_of_its_own_compiles_to_the_same_instructions(kind, head_dim, head_dim_v, changes):
    tile = triton_tiles.tile_for("hopper", head_dim, kind, torch.bfloat16, head_dim_v)
    label = kind + "+" * ("accumulate" in changes) + "c" * ("softcap" in changes) + f"/{head_dim_v}"
    made = compile_kind(kind, head_dim, torch.bfloat16, tile, head_dim_v=head_dim_v, **changes)
    assert_sound(label, head_dim, tile, made)


def test_without_a_cap_there_is_no_trace_of_one():
    tile = triton_tiles.tile_for("hopper", 64, "dq", torch.bfloat16)
    plain, capped = (compile_kind("dq", 64, torch.bfloat16, tile, softcap=softcap).ptx for softcap in (0.0, 20.0))
    parameters, divisions = ([len(re.findall(what, ptx)) for ptx in (plain, capped)] for what in (r"\.param \.f32", r"div\.full"))
    assert parameters[1] == parameters[0] + 2 and divisions[0] == 0 < divisions[1]


@pytest.mark.parametrize("arch, capability", [("ampere", 80), ("small", 86)])
@pytest.mark.parametrize("kind, head_dim, changes", [
    ("forward", 128, {}), ("dkv", 128, {}), ("forward", 192, dict(head_dim_v=128, softcap=20.0)),
    ("dkv", 192, dict(head_dim_v=128, softcap=20.0)), ("dq", 192, dict(head_dim_v=128)),
], ids=str)
def test_other_architectures_compile_and_fit_their_shared_memory(arch, capability, kind, head_dim, changes):
    tile = triton_tiles.tile_for(arch, head_dim, kind, torch.bfloat16, changes.get("head_dim_v"))
    made = compile_kind(kind, head_dim, torch.bfloat16, tile, GPUTarget("cuda", capability, 32), **changes)
    assert "mma.sync" in made.ptx and made.shared <= SHARED_LIMIT[capability]


def test_the_table_has_an_entry_for_every_architecture_head_dim_and_dtype():
    for arch in ("hopper", "ampere", "small", "interpreter"):
        for head_dim in (1, 16, 40, 64, 80, 128, 160, 256):
            for kind in triton_tiles.KINDS:
                for dtype in (torch.float16, torch.bfloat16, torch.float32):
                    tile = triton_tiles.tile_for(arch, head_dim, kind, dtype)
                    assert tile == triton_tiles.tile_for(arch, 1, kind, dtype, head_dim) == triton_tiles.tile_for(
                        arch, head_dim, kind, dtype, 1), "the wider of both dims chooses"
                    assert tile.dq in ("tma", "atomic", "separate")
                    if arch == "hopper" and kind == "backward" and tile.dq != "separate":
                        assert tile.block_n >= 128, "dq traffic goes by the number of key tiles"
