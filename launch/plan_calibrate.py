"""`plan.py calibrate`: the rates of the GPU at hand, on the model's own shapes, at most 64K tokens long, in about a minute.

Each is taken over long enough a run for the chip to be at its power cap. With run.device=cpu the sizes are tiny: a test of the
code, and a file that no --gpu takes. Its steps take tiles of 4,096 rows where train.tile_rows is not given.
"""
from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from ringflash import Layout, Mask, ring_attention
from ringflash.config import Config
from ringflash.kernels import dispatch
from ringflash.launch.check_table import environment
from ringflash.launch.files import check_writable
from ringflash.model.build import build_model
from ringflash.planning.hardware import DEFAULT, GPUS, hardware_of, kind_of
from ringflash.planning.job import POLICIES, Job, head_dim_of
from ringflash.planning.live_bytes import LiveBytes
from ringflash.planning.search import predict
from ringflash.train.gradients import clip_gradients, gradient_norm
from ringflash.train.optim import build_optimizer
from ringflash.train.trainer import layer_masks
from ringflash.train.world import pick_device

TILE_ROWS = 4096  # where train.tile_rows is not given: the MLP's tensors for this many rows at a time
LENGTHS = {"cuda": (8192, 16384, 32768, 65536), "cpu": (64, 128)}
STEP_LENGTHS = {"cuda": (16384, 65536), "cpu": (64, 256)}
_MIN_S = {"cuda": 0.4, "cpu": 0.01}  # that a rate is timed for at least


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", required=True, help="the calibration, for --calibration")
    parser.add_argument("--gpu", help=f"whose table stands for what is not measured: {', '.join(GPUS)} (default: the card's kind)")
    parser.add_argument("--layers", type=int, default=2, help="of the training steps (default 2)")
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps: no memory, no rest_factor")


def run(options: argparse.Namespace, read_config: Callable[..., Config]) -> int:
    check_writable("--json", options.json)
    cfg = read_config(options.overrides, 1)
    cfg.train.tile_rows = cfg.train.tile_rows or TILE_ROWS
    device = device_at_hand(cfg)
    if device.type == "cpu":
        cfg.train.dtype = "fp32"
        print("run.device=cpu: a test of the code; no --gpu takes this file")
    began = time.perf_counter()
    rates: dict[str, object] = {}
    written = {"rates": rates, "environment": environment_of(device), "overrides": list(options.overrides), "steps": []}

    def note(name: str, value: object) -> None:
        rates[name] = value
        print(f"{time.perf_counter() - began:6.1f} s  {name} {value}", flush=True)
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")

    note("matmul_tflops", matmul_tflops(cfg, device))
    note("memory_gb_s", memory_gb_s(cfg, device))
    for pass_, curve in attention_tflops(cfg, device).items():
        note(f"{pass_}_tflops", curve)
    note("optimizer_ns", optimizer_ns(cfg, device))
    if device.type == "cuda":
        note("host_gb_s", host_gb_s(device))
        note("memory_gib", torch.cuda.get_device_properties(device).total_memory / 2**30)
    if not options.no_steps:
        for policy in POLICIES:
            for length in STEP_LENGTHS[device.type]:
                record = train_step(cfg, device, policy, length, options.layers)
                written["steps"].append(record)
                print(f"{time.perf_counter() - began:6.1f} s  step {record}", flush=True)
        for name, value in corrections(cfg, written, options).items():
            note(name, value)
    return 0


def device_at_hand(cfg: Config) -> torch.device:
    """The first GPU, or where run.device=cpu asks for it the CPU. ValueError where there is no GPU and it does not."""
    if cfg.run.device != "cpu" and torch.cuda.device_count() == 0:
        raise ValueError(f"run.device={cfg.run.device}: what is measured is a GPU, this machine has 0; nearest: run.device=cpu, "
                         "which says nothing of one")
    return pick_device(cfg.run.device, 0)


def environment_of(device: torch.device) -> dict:
    """As of check.py, of the device that measures: a card that is there and not used is not named."""
    return environment() | ({"device": "cpu", "devices": 0} if device.type == "cpu" else {})


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median of five runs that together take _MIN_S, after as long a warm-up."""
    def timed(repeats: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(device)
        return (time.perf_counter() - start) / repeats

    timed(2)
    repeats = max(1, int(_MIN_S[device.type] / 5 / max(timed(2), 1e-7)))
    timed(2 * repeats)
    return statistics.median(timed(repeats) for _ in range(5))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _dtype(cfg: Config, device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" or cfg.train.dtype == "fp32" else torch.bfloat16


def matmul_tflops(cfg: Config, device: torch.device) -> float:
    """Of a layer's products, forward and both gradients, rows as in a tile."""
    model, dtype = cfg.model, _dtype(cfg, device)
    rows = min(cfg.train.tile_rows, 8192) if device.type == "cuda" else 64
    head_dim = head_dim_of(model)
    x = torch.randn(rows, model.dim, device=device, dtype=dtype)
    shapes = [(model.dim, (model.num_heads + 2 * model.num_kv_heads) * head_dim), (model.num_heads * head_dim, model.dim),
              (model.dim, model.ffn_dim), (model.dim, model.ffn_dim), (model.ffn_dim, model.dim)]
    seconds = flops = 0.0
    for inner, outer in shapes:
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight, dy = (torch.randn(n, m, device=device, dtype=dtype) for n, m in ((outer, inner), (rows, outer)))

        def products() -> None:
            F.linear(x, weight)
            dy @ weight
            torch.mm(dy.t(), x, out_dtype=torch.float32) if x.is_cuda and dtype.itemsize == 2 else dy.t() @ x

        seconds += seconds_of(products, device)
        flops += 6.0 * rows * inner * outer
    return flops / seconds / 1e12


def memory_gb_s(cfg: Config, device: torch.device) -> float:
    """Of a product of two tensors as wide as the MLP: two reads, a write."""
    rows = 16384 if device.type == "cuda" else 64
    a, b = (torch.randn(rows, cfg.model.ffn_dim, device=device, dtype=_dtype(cfg, device)) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * a.nbytes / seconds_of(lambda: torch.mul(a, b, out=out), device) / 1e9


def attention_tflops(cfg: Config, device: torch.device) -> dict[str, list]:
    """[[rows, TFLOP/s], ...] of a causal visit, by pass: the kernel that `auto` takes, with delta in the backward."""
    model, dtype = cfg.model, _dtype(cfg, device)
    head_dim = head_dim_of(model)
    backend = dispatch.select(cfg.attention.kernel, device=device, dtype=dtype, head_dim=head_dim)
    found: dict[str, list] = {"forward": [], "backward": []}
    for rows in LENGTHS[device.type]:
        q, k, v, dout = (torch.randn(1, rows, heads, head_dim, device=device, dtype=dtype)
                         for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
        ends = torch.arange(1, rows + 1, dtype=torch.int32)
        intervals = dispatch.Intervals.from_rows(torch.zeros_like(ends), ends, rows, device)
        out, lse = torch.empty_like(q), torch.empty(1, model.num_heads, rows, device=device)
        dq, dk, dv = (torch.empty(x.shape, device=device) for x in (q, k, v))
        options = dict(softmax_scale=head_dim ** -0.5, softcap=model.softcap)

        def forward() -> None:
            backend.forward(q, k, v, intervals, state=None, lse=lse, out=out, first=True, **options)

        def backward() -> None:
            backend.backward(dout, q, k, v, lse, backend.delta(dout, out), intervals, dq=dq, dk=dk, dv=dv, accumulate_dq=False,
                             accumulate_dkv=False, deterministic=cfg.attention.deterministic, **options)

        flops = 2.0 * rows * (rows + 1) * head_dim * model.num_heads
        for pass_, call, work in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            found[pass_].append([rows, work * flops / seconds_of(call, device) / 1e12])
    return found


def optimizer_ns(cfg: Config, device: torch.device) -> float:
    """Per parameter: norm, clipping and a step over matrices of the MLP's shape, without optim.offload."""
    count = 4 if device.type == "cuda" else 1
    weights = [torch.nn.Parameter(torch.randn(cfg.model.ffn_dim, cfg.model.dim, device=device)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    plain = type(cfg.optim)(**{**vars(cfg.optim), "offload": False})
    optimizer = build_optimizer(plain, weights)

    def step() -> None:
        clip_gradients(weights, gradient_norm(weights), 1e-3)
        optimizer.step()

    return seconds_of(step, device) / sum(weight.numel() for weight in weights) * 1e9


def host_gb_s(device: torch.device) -> float:
    """The slower way between the GPU and pinned memory."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    own = torch.empty_like(host, device=device)
    return min(host.nbytes / seconds_of(functools.partial(to.copy_, of, non_blocking=True), device) / 1e9
               for to, of in ((own, host), (host, own)))


def train_step(cfg: Config, device: torch.device, policy: str, seq_len: int, layers: int) -> dict:
    """Seconds and peak live GiB of the second step of a model of a few layers, on one rank without FSDP."""
    model_options = type(cfg.model)(**{**vars(cfg.model), "num_layers": layers})
    train = type(cfg.train)(**{**vars(cfg.train), "activations": policy})
    few = type(cfg)(**{**vars(cfg), "model": model_options, "train": train})
    layout = Layout(cfg.attention.layout, seq_len, 1, layer_masks(cfg.attention))
    attention = functools.partial(ring_attention, kernel=cfg.attention.kernel, deterministic=cfg.attention.deterministic)
    with torch.device("meta"):
        model = build_model(few, attention)
    model.to_empty(device=device)
    if cfg.model.tie_embeddings:            # to_empty makes two parameters of one
        model.head.weight = model.embedding.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    weights = list(model.parameters())
    optimizer = build_optimizer(cfg.optim, weights)
    for group in optimizer.param_groups:
        group["foreach"] = True  # torch's default on GPUs alone, and what the prediction counts: one copy of all gradients
    tokens = torch.randint(cfg.model.vocab_size, (cfg.data.batch_size, seq_len), device=device)
    positions = torch.arange(seq_len, device=device)
    is_cuda = device.type == "cuda"
    live = None if is_cuda else LiveBytes([*weights, tokens, positions])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=_dtype(cfg, device) == torch.bfloat16):
            loss = model(tokens, positions, tokens, layout=layout)
        (loss / seq_len).backward()
        del loss
        clip_gradients(weights, gradient_norm(weights), cfg.optim.grad_clip)
        optimizer.step()

    if live is None:
        step()
        torch.cuda.reset_peak_memory_stats(device)
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
    else:
        with live:
            step()
            live.reset_peak()
            start = time.perf_counter()
            step()
        seconds, peak, reserved = time.perf_counter() - start, live.peak, live.peak
    del model, optimizer, weights, tokens
    if is_cuda:
        torch.cuda.empty_cache()
    return {"activations": policy, "seq_len": seq_len, "layers": layers, "seconds": seconds, "peak_gib": peak / 2**30,
            "reserved_gib": reserved / 2**30}


def corrections(cfg: Config, written: dict, options: argparse.Namespace) -> dict[str, float]:
    """rest_factor, extra_gib and slack, from the longest step of each policy beside its prediction."""
    kind = options.gpu or kind_of(written["environment"]["device"]) or DEFAULT
    hardware = hardware_of(kind).given(written["rates"], "calibration")
    rest, extra, slack = [], [], []
    for record in written["steps"]:
        if record["seq_len"] != max(each["seq_len"] for each in written["steps"]):
            continue
        prediction = predict(job_of(cfg, record), hardware)
        parts = prediction.time.parts
        corrected = sum(value for part, value in parts.items() if part.startswith("matmul") or part == "head and loss")
        others = prediction.time.seconds - corrected
        if record["seconds"] > others:
            rest.append((record["seconds"] - others) / corrected)
        extra.append(record["peak_gib"] - prediction.memory.live_gib)
        slack.append(max(record["reserved_gib"] / record["peak_gib"] - 1, 0.0))
    # A sum, not a factor: what was not counted (workspaces of libraries, what a tile leaves behind) does not grow with the length.
    found = {"extra_gib": max(0.0, statistics.median(extra)), "slack": statistics.median(slack)}
    return found | ({"rest_factor": statistics.median(rest)} if rest else {})


def job_of(cfg: Config, record: dict) -> Job:
    """One GPU, a few layers, as train_step runs it."""
    model = type(cfg.model)(**{**vars(cfg.model), "num_layers": record["layers"]})
    data = type(cfg.data)(**{**vars(cfg.data), "seq_len": record["seq_len"]})
    few = type(cfg)(**{**vars(cfg), "model": model, "data": data})
    return Job(few, layer_masks(cfg.attention), 1, 8, 1, 1, 1, 1, record["activations"])

