"""What the compiler makes of the hopper backward, seen without a GPU: every variant, compiled for sm_90 from a launch's own
arguments, uses wgmma and bulk copies, spills no more than recorded, and ptxas serialises no wgmma."""
from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")
import triton  # noqa: E402

from ringflash.kernels.triton_support import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing is compiled")
if not INTERPRETED:
    from ringflash.kernels import hopper_backward
    from ringflash.kernels.hopper_backward_kernel import backward_kernel
    from ringflash.kernels.intervals import Intervals
    from ringflash.tests.support.gluon_compile import build, sass

SHARED_LIMIT = 227 << 10
DTYPES = (torch.float16, torch.bfloat16)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Bytes of spill stores + loads per thread by triton 3.6, 3.7, and 3.8 and later; absent: none. (head_dim, softcap, with dq). At
# D = 128 the registers of a consumer (240) hold dk and dv (128), s or dp (32), p (32) and dq (32); what is spilled are numbers that
# the prologue made for the epilogue, and with a cap or by 3.8 a few in the loop. At D = 64 s, dp and the cap's tanh take 64 each,
# beside p in 16 bits (32).
SPILLS = {
    (128, False, True): (0, 16, 348), (128, True, True): (96, 0, 272), (128, True, False): (48, 24, 24),
    (64, False, True): (48, 40, 0), (64, True, True): (292, 224, 276), (64, True, False): (36, 32, 0),
}
# Instructions of a usual loop (of 560 to 1,060) that load or store a spilled register, from triton 3.8 on; before, none.
LOOP_SPILLS_LATER = {128: 19, 64: 0}
SLACK = 32  # fp16 and bf16, and ptxas versions, differ by a few bytes


def launch(head_dim: int, dtype: torch.dtype, softcap: float = 0.0, with_dq: bool = True, accumulate: bool = False):
    """Of one visit of 300 rows, 4 query heads on 2; k, v and dk, dv as views of packed buffers."""
    rows, heads, kv_heads = 300, 4, 2
    q = torch.zeros(1, rows, heads, head_dim, dtype=dtype)
    k, v = torch.zeros(rows, 1, kv_heads, 2 * head_dim, dtype=dtype).transpose(0, 1).split(head_dim, -1)
    dk, dv = torch.full((rows, 1, kv_heads, 2 * head_dim), 7.0).transpose(0, 1).split(head_dim, -1)
    numbers = torch.zeros(heads, 384)
    bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), rows, dtype=torch.int32)
    return hopper_backward.backward_launch(
        q, q, k, v, numbers, numbers, Intervals.from_host(*bounds, *bounds, "cpu"),
        torch.zeros(1, rows, heads, head_dim) if with_dq else None, dk, dv, 0.125, softcap, 1, accumulate,
        hopper_backward.VARIANTS[head_dim], 132)


@pytest.mark.parametrize("softcap, with_dq", [(0.0, True), (30.0, True), (0.0, False), (30.0, False)],
                         ids=["plain", "capped", "plain-without-dq", "capped-without-dq"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_variant_uses_wgmma_and_bulk_copies_and_spills_no_more_than_recorded(head_dim, dtype, softcap, with_dq):
    _, arguments, options = launch(head_dim, dtype, softcap, with_dq)
    made = build(backward_kernel, arguments, options)
    steps = head_dim // 16
    # per consumer: K Q^T and V dO^T; dv and dk; dq in the loop and after it
    products = 2 * steps + 2 * arguments["BM"] // 16 + (2 * 128 // 16 if with_dq else 0)
    assert made.wgmma == 2 * products and "mma.sync" not in made.ptx
    allowed = SPILLS.get((head_dim, softcap > 0, with_dq), (0, 0, 0))[min(max(TRITON[1] - 6, 0), 2)]
    assert made.spill_bytes <= allowed + SLACK, f"{made.spill_bytes} bytes of spills, recorded {allowed}"
    assert made.shared <= SHARED_LIMIT
    assert made.warnings == (), f"ptxas serialised wgmma: {made.warnings}"
    assert "cp.async.bulk.tensor" in made.ptx and "cp.reduce.async.bulk.tensor" in made.ptx
    # no atomics over heads, or any others from registers
    assert not re.search(r"\b(red|atom)\.[\w.]*global", made.ptx)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_loop_of_the_usual_variant_keeps_everything_in_registers(head_dim):
    _, arguments, options = launch(head_dim, torch.bfloat16)
    products = 2 * head_dim // 16 + 2 * arguments["BM"] // 16 + 128 // 16
    loops = consumer_loops(sass(backward_kernel, arguments, options), products)
    assert len(loops) == 2
    for loop in loops:
        assert sum("MUFU.EX2" in line for line in loop) == arguments["BM"] // 2, "64 keys x BM queries over 128 threads"
        spilled = [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]
        assert len(spilled) <= (LOOP_SPILLS_LATER[head_dim] if TRITON >= (3, 8) else 0), spilled


def consumer_loops(text: str, products: int) -> list[list[str]]:
    """The instructions of each consumer's loop: the shortest disjoint backward branches over that many wgmma."""
    lines = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(\S[^;]*);", text)]
    index = {address: i for i, (address, _) in enumerate(lines)}
    spans = []
    for i, (address, line) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)
        start = index.get(int(target[1], 16)) if target else None
        if start is not None and start <= i and sum("HGMMA" in text for _, text in lines[start: i + 1]) == products:
            spans.append((i + 1 - start, start, i + 1))
    found: list[tuple[int, int]] = []
    for _, start, stop in sorted(spans):
        if all(stop <= a or b <= start for a, b in found):
            found.append((start, stop))
    return [[text for _, text in lines[start:stop]] for start, stop in found]


def test_one_kernel_serves_writing_and_adding():
    """Whether to add stands in the table of programs: a ring's first and later visits share one compiled kernel."""
    (_, wrote, _), (_, added, _) = (launch(64, torch.bfloat16, 0.0, False, accumulate) for accumulate in (False, True))
    assert all(wrote[name] == added[name] for name in wrote if isinstance(wrote[name], (int, float)))
    assert [bool((made["items"][:, 6] == add).all()) for made, add in ((wrote, 0), (added, 1))] == [True, True]


def test_rows_that_several_programs_add_to_are_zeroed_first_unless_they_hold_something():
    for accumulate in (False, True):
        _, arguments, _ = launch(128, torch.bfloat16, accumulate=accumulate)
        first = [record[0] for record in arguments["items"].tolist()]
        shared = {row for col0 in first if first.count(col0) > 1 for row in range(col0, col0 + 128)}
        assert shared, "300 rows are too few for 132 SMs"
        for row in range(300):
            assert bool((arguments["dv"].base[:, row] == (0.0 if row in shared and not accumulate else 7.0)).all())
