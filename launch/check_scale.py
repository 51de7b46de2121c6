"""Claims about one device that no single cell shows: errors do not grow with the ring, same bits every run, linear memory."""
from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence

import torch

from ringflash import Layout, Mask, simulate
from ringflash.launch.check_cells import DTYPES, LAYOUTS, TENSORS, Cell
from ringflash.launch.check_judge import Tensors, loopback_cell
from ringflash.launch.check_table import grid
from ringflash.tests.support import budgets, oracle

GROWTH_LIMIT = 1.1                          # RMS error at the larger ring over that of one rank
MEMORY_LINEARITY = 0.1                      # how far bytes per token may differ between lengths
SLACK_BYTES = 256 << 20                     # what does not depend on the length: workspaces, caches


@dataclasses.dataclass(frozen=True)
class Problem:
    """Global tensors of one causal problem; q, dout [1, S, Hq, D], k, v [1, S, Hkv, D]."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
               device: torch.device) -> Problem:
        generator = torch.Generator(device).manual_seed(20)
        return cls(*(torch.randn(1, seq_len, heads, head_dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
                     for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)))

    def run(self, cp_size: int, layout: str, kernel: str, rotate: str = "auto") -> Tensors:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        mask = Mask(causal=True)
        out, lse = simulate(q, k, v, cp_size=cp_size, layout=Layout(layout, q.shape[1], cp_size, mask), mask=mask, kernel=kernel,
                            return_lse=True, rotate=rotate)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), self.dout)
        return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def growth(kernel: str, device: torch.device, *, seq_len: int, head_dim: int, dtype: str = "bf16", cp_size: int = 8,
           layouts: Sequence[str] = LAYOUTS) -> tuple[bool, list[dict]]:
    """RMS errors against float64 of a ring of cp_size and of one rank: out, dq, dk, dv may grow by a tenth at most."""
    problem = Problem.random(seq_len, 4, 2, head_dim, DTYPES[dtype], device)
    truth = oracle.attention_oracle(problem.q, problem.k, problem.v, dout=problem.dout)

    def errors(result: Tensors) -> dict[str, float]:
        return {name: float((result[name].double() - getattr(truth, name)).square().mean().sqrt()) for name in TENSORS}

    one = errors(problem.run(1, "zigzag", kernel))
    records = []
    for layout in layouts:
        ring = errors(problem.run(cp_size, layout, kernel))
        for name in TENSORS:
            ratio = ring[name] / one[name]
            # lse is fp32 throughout: its error is that of summation, a few ulp, and has a budget but no such claim.
            ok = name == "lse" or ratio <= GROWTH_LIMIT
            records.append({"kernel": kernel, "layout": layout, "tensor": name, "rms_one_rank": one[name], "rms_ring": ring[name],
                            "ratio": ratio, "ok": ok})
    print(f"\nGrowth of the error with the ring: {kernel}, {dtype}, causal, S={seq_len}, D={head_dim}, W={cp_size} against "
          f"one rank (limit {GROWTH_LIMIT}x)\n")
    print(grid(["layout", "tensor", "rms W=1", f"rms W={cp_size}", "ratio", ""],
               [[r["layout"], r["tensor"], f"{r['rms_one_rank']:.3e}", f"{r['rms_ring']:.3e}", f"{r['ratio']:.3f}",
                 "-" if r["tensor"] == "lse" else "ok" if r["ok"] else "FAIL"] for r in records]), flush=True)
    return all(r["ok"] for r in records), records


def bitwise(kernels: Sequence[str], device: torch.device, *, repeats: int, seq_len: int, head_dim: int, dtype: str = "bf16",
            cp_size: int = 4) -> tuple[bool, list[dict]]:
    """Repeats each computation: out and lse must be the same bits every time, dq, dk, dv too with deterministic=True."""
    records = []
    for kernel in kernels:
        for layout in LAYOUTS:
            for mask in ("causal", "documents+window"):
                cell = Cell(kernel, dtype, mask, layout, cp_size, 4, seq_len, head_dim, deterministic=True)
                free = dataclasses.replace(cell, deterministic=False)
                first, first_free = loopback_cell(cell, device), loopback_cell(free, device)
                different = set()
                for _ in range(repeats - 1):
                    again, again_free = loopback_cell(cell, device), loopback_cell(free, device)
                    different |= {name for name in TENSORS if not _same(first[name], again[name])}
                    different |= {name for name in ("out", "lse") if not _same(first_free[name], again_free[name])}
                records.append({"kernel": kernel, "layout": layout, "mask": mask, "repeats": repeats,
                                "different": sorted(different), "ok": not different})
    print(f"\nSame bits in {repeats} runs: out, lse; dq, dk, dv with deterministic=True (W={cp_size}, S={seq_len}, D={head_dim}, "
          f"{dtype})\n")
    print(grid(["kernel", "mask", "layout", "differ", ""],
               [[r["kernel"], r["mask"], r["layout"], " ".join(r["different"]) or "none", "ok" if r["ok"] else "FAIL"]
                for r in records]), flush=True)
    return all(r["ok"] for r in records), records


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bytes, so that NaN equals itself and 0 is not -0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def memory(kernel: str, device: torch.device, *, seq_lens: Sequence[int], num_heads: int = 8, head_dim: int = 128,
           dtype: str = "bf16", cp_size: int = 8, layout: str = "zigzag", rotate: str = "kv") -> tuple[bool, list[dict]]:
    """Peak memory and seconds of forward + backward of a loopback ring at rising lengths; bytes per token must stay the same.

    At every length out, lse and dq of sampled rows (the first and last 256 among them), and dk, dv of the last 256 keys, are
    judged against float64. rotate: what goes round in the backward (with as many KV heads as query heads, "auto" would be "q").
    Raises RuntimeError without a CUDA device: the CPU allocator keeps no such figure.
    """
    if device.type != "cuda":
        raise RuntimeError("memory: peak memory is only kept for CUDA devices, and there is none here")
    records = []
    gc.collect()                                        # what died in a cycle would be freed while a length is measured
    resident = torch.cuda.memory_allocated(device)      # others' in this process, and the caches
    for seq_len in seq_lens:
        problem = Problem.random(seq_len, num_heads, num_heads, head_dim, DTYPES[dtype], device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        input_bytes = torch.cuda.memory_allocated(device) - resident
        torch.cuda.reset_peak_memory_stats(device)
        record = {"kernel": kernel, "rotate": rotate, "seq_len": seq_len, "input_bytes": input_bytes, "failure": None}
        records.append(record)
        start = time.perf_counter()
        try:
            result = problem.run(cp_size, layout, kernel, rotate)
            torch.cuda.synchronize(device)
        except torch.cuda.OutOfMemoryError as error:
            record["failure"] = f"out of memory: {error}".splitlines()[0]
            break
        record["seconds"] = time.perf_counter() - start
        record["peak_bytes"] = torch.cuda.max_memory_allocated(device) - resident
        record["bytes_per_token"] = record["peak_bytes"] / seq_len
        record["ratios"] = sampled_ratios(problem, result)
        del problem, result
    good = [r for r in records if r["failure"] is None]
    rates = [(b["peak_bytes"] - a["peak_bytes"]) / (b["seq_len"] - a["seq_len"]) for a, b in zip(good, good[1:])]
    linear = len(good) == len(seq_lens) and all(
        abs(r["peak_bytes"] - rates[0] * r["seq_len"]) <= MEMORY_LINEARITY * r["peak_bytes"] + SLACK_BYTES for r in good)
    within = all(ratio <= 1.0 for r in good for ratio in r["ratios"].values())
    print(f"\nMemory of a loopback ring: {kernel}, {dtype}, causal, {num_heads} heads, D={head_dim}, W={cp_size}, {layout}, "
          f"forward + backward, rotate={rotate}\n")
    print(grid(["tokens", "peak GiB", "KiB/token", "s", *TENSORS],
               [[r["seq_len"], f"{r['peak_bytes'] / 2**30:.2f}", f"{r['bytes_per_token'] / 2**10:.2f}", f"{r['seconds']:.2f}",
                 *(f"{r['ratios'][name]:.2f}" for name in TENSORS)] for r in good]))
    for record in records:
        if record["failure"] is not None:
            print(f"FAIL at {record['seq_len']} tokens: {record['failure']}")
    print(f"memory linear in the length: {'yes' if linear else 'NO'}; sampled rows within budget: {'yes' if within else 'NO'}",
          flush=True)
    return linear and within and bool(good), records


def sampled_ratios(problem: Problem, result: Tensors, count: int = 64, last: int = 256) -> dict[str, float]:
    """Worst error over budget on sampled query rows, and for dk, dv on the last keys: under a causal mask only the last rows read
    those, so that their gradient is exact without a pass over all rows. Head by head, as float64 copies of all would not fit."""
    heads = [_head_ratios(*(_one_head(x, h) for x in (problem, result)), count, last) for h in range(problem.k.shape[2])]
    return {name: max(ratios[name] for ratios in heads) for name in TENSORS}


def _one_head(tensors, h: int):
    """Key/value head h and the query heads that read it, of a Problem or of a result."""
    if isinstance(tensors, Problem):
        group = tensors.q.shape[2] // tensors.k.shape[2]
        mine = slice(h * group, (h + 1) * group)
        return Problem(tensors.q[:, :, mine], tensors.k[:, :, h:h + 1], tensors.v[:, :, h:h + 1], tensors.dout[:, :, mine])
    group = tensors["dq"].shape[2] // tensors["dk"].shape[2]
    mine = slice(h * group, (h + 1) * group)
    return {name: x[:, :, h:h + 1] if name in ("dk", "dv") else x[:, mine] if name == "lse" else x[:, :, mine]
            for name, x in tensors.items()}


def _head_ratios(problem: Problem, result: Tensors, count: int, last: int) -> dict[str, float]:
    seq_len = problem.q.shape[1]
    rows = oracle.sample_rows(seq_len, count).to(problem.q.device)
    arguments = dict(dout=problem.dout, rows=rows)
    pair = [f(problem.q, problem.k, problem.v, **arguments) for f in (oracle.attention_oracle, oracle.eager_attention)]
    mine = {"out": result["out"][:, rows], "lse": result["lse"][:, :, rows], "dq": result["dq"][:, rows]}
    ratios = {v.name: _ratio(v) for v in budgets.budgets(mine, *pair)}
    tail = slice(max(0, seq_len - last), seq_len)
    pair = [_tail_gradients(problem, tail, f) for f in (oracle.attention_oracle, oracle.eager_attention)]
    mine = {"dk": result["dk"][:, tail], "dv": result["dv"][:, tail]}
    return ratios | {v.name: _ratio(v) for v in budgets.budgets(mine, *pair)}


def _tail_gradients(problem: Problem, tail: slice, attention) -> oracle.Result:
    """dk, dv of the last keys from the last queries alone, over all keys (a causal mask aligned at the bottom right)."""
    whole = attention(problem.q[:, tail], problem.k, problem.v, dout=problem.dout[:, tail])
    return dataclasses.replace(whole, dk=whole.dk[:, tail], dv=whole.dv[:, tail], key_is_read=whole.key_is_read[tail])


def _ratio(verdict: budgets.Verdict) -> float:
    if verdict.why:
        return float("inf")
    return max(verdict.max_error / verdict.max_budget, verdict.rms_error / verdict.rms_budget)
