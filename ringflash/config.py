"""The configuration of a run: one dataclass per group of `configs/`, and every rule that spans more than one value.

Plain dataclasses: no hydra, no omegaconf, no torch. `launch/` registers `Config` as Hydra's schema, so a misspelt key or a wrong
type fails while composing; `validate` holds the rest and names the dotted key, its value, the rule and the nearest valid values.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringflash.checkpointing import CheckpointConfig, checkpoint_problems, timeout_problems
from ringflash.data_options import NUM_TOKENS, POSITIONS, DataConfig, data_problems  # noqa: F401
from ringflash.degrees import ParallelConfig, degrees_of, divisors, nearest, shard_problems, ulysses_problems
from ringflash.eval_options import EvalConfig, eval_problems, profile_problems
from ringflash.memory_options import memory_problems
from ringflash.rotary import RopeScaling, rope_problems

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "auto")
KERNELS = ("auto", "hopper", "triton", "cpu", "reference")
EXCHANGES = ("auto", "copy", "nccl", "gloo")
ROTATES = ("auto", "kv", "q")
ROUTINGS = ("auto", "ring", "direct", "allgather")
OPTIMIZERS = ("adamw", "sgd")
DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
LAYERS = ("global", "window", "chunk")
# What exists as a name and is still to be built: refused by name, so that nobody takes a typo for a missing feature.
LATER = {"train.dtype": ("fp16",)}
MAX_HEAD_DIM = 256
SOFTCAP_RANGE = (1e-30, 1e30)


@dataclass
class ModelConfig:
    """A Llama-style decoder (RMSNorm, RoPE, GQA, SwiGLU), or with `hf` a model of transformers."""

    vocab_size: int = 257
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 384
    head_dim: int | None = None  # None: dim / num_heads
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    loss_chunk_rows: int = 1024  # rows of fp32 logits that exist at a time
    softcap: float = 0.0  # attention scores are c * tanh(score / c); 0: as they are
    sinks: bool = False  # a learnt logit per head and layer that takes its share of each row's softmax
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qk_norm: bool = False  # q and k of every head through an RMSNorm of their own, before they are turned
    z_loss: float = 0.0  # in training the loss has z_loss * logsumexp(logits) ** 2 per token added; 0: off
    hf: str | None = None  # a model of transformers, whose sizes rule: a folder with config.json, that file, or a name on the Hub
    weights: str | None = None  # a folder with the first weights: weights.pt, or of Hugging Face safetensors; None: drawn


@dataclass
class AttentionConfig:
    layout: str = "zigzag"
    kernel: str = "auto"
    exchange: str = "auto"
    routing: str = "auto"  # how K and V reach their readers; auto: by the rows that ranks read
    rotate: str = "auto"  # what goes round in the backward: kv, or q (the Q side); auto: whichever sends fewer bytes
    window_size: list[int] = field(default_factory=lambda: [-1, -1])  # (left, right), -1: unlimited
    first_tokens: int = 0  # of each document: seen also where the window has left them
    chunk_size: int | None = None  # tokens of a "chunk" layer see their own chunk only
    # What the layers see, repeated over them: "global", "window" (window_size) or "chunk". []: window_size in every layer.
    layers: list[str] = field(default_factory=list)
    deterministic: bool = False  # gradients have the same bits from run to run, the embedding's too


@dataclass
class OptimConfig:
    name: str = "adamw"
    lr: float = 3e-3
    min_lr_ratio: float = 0.1  # the cosine ends at lr * min_lr_ratio
    warmup_steps: int = 10
    weight_decay: float = 0.1  # matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0  # sgd only
    grad_clip: float = 1.0  # 0: off
    offload: bool = False  # AdamW's moments stay in pinned host memory and pass through the GPU once a step


@dataclass
class TrainConfig:
    steps: int = 100
    accumulation: int = 1  # micro-batches per dp rank and optimizer step
    dtype: str = "auto"  # of activations: fp32 on CPU, bf16 on GPU; weights and gradients are fp32
    seed: int = 0
    log_every: int = 1
    eval_every: int = 0  # 0: at the end only
    eval_sequences: int = 8  # of the held-out split, over all ranks; 0: nothing is evaluated
    # What a layer keeps for its backward. none: everything; block: its input; block_save_attention: its input, and attention's
    # output; offload: as block_save_attention, in pinned host memory; auto: the fastest of these that a memory model says fits.
    activations: str = "none"
    tile_rows: int = 0  # norms and MLP so many rows at a time, made again in the backward; 0: all rows at once
    residual_dtype: str = "fp32"  # of the sum that runs through the layers
    loss: str = "chunked"  # liger: Liger's fused linear cross-entropy, a GPU kernel
    on_nonfinite: str = "stop"  # when loss or gradient norm are NaN or inf: stop, or skip (the step changes nothing, on any rank)
    max_skipped: int = 10  # in a row; one more ends the run
    tensorboard: bool = False  # the figures of metrics.jsonl also as event files, in the run folder's tensorboard/
    profile: int = 0  # steps of which a trace is written, to be looked at in chrome://tracing or ui.perfetto.dev; 0: none
    profile_after: int = 3  # steps that come before them
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # whose steps


@dataclass
class RunConfig:
    name: str = "run"
    root: str = "outputs"
    dir: str | None = None  # None: a fresh folder <root>/<name>-<time>
    device: str = "auto"
    progress: bool = True
    plot: bool = True
    save_weights: bool = True


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


def parallel_degrees(cfg: Config, world_size: int) -> tuple[int, int]:
    """(dp, cp) with -1 resolved. Raises ValueError unless dp * cp == world_size."""
    problem, degrees = degrees_of(cfg.parallel, world_size)
    if problem:
        raise ValueError(problem)
    return degrees


def validate(cfg: Config, world_size: int) -> tuple[int, int]:
    """Checks every rule that a schema cannot hold; returns (dp, cp).

    Raises ValueError with a line for each broken rule: dotted key and value, the rule with its numbers, the nearest valid values.
    """
    problem, degrees = degrees_of(cfg.parallel, world_size)
    problems = [problem] if problem else (ulysses_problems(cfg.parallel, degrees[1], cfg.model.num_heads)
                                          + shard_problems(cfg.parallel, degrees[0] * degrees[1], cfg.train.accumulation))
    if cfg.model.hf is not None and not problem and cfg.data.seq_len < degrees[1]:
        problems.append(f"data.seq_len={cfg.data.seq_len}: each of {degrees[1]} cp ranks needs a token, modules of transformers "
                        f"(model.hf) take none without; nearest: {degrees[1]}")
    for rules in (_model, _data, _attention, _optim, _train, _run):
        problems += rules(cfg)
    problems += checkpoint_problems(cfg.checkpoint) + memory_problems(cfg) + eval_problems(cfg)
    problems += profile_problems(cfg.train.profile_ranks, world_size)
    if problems:
        raise ValueError("\n".join(problems))
    return degrees


def _at_least(cfg: Config, low: float, *keys: str) -> list[str]:
    problems = []
    for key in keys:
        group, name = key.split(".")
        value = getattr(getattr(cfg, group), name)
        if not (math.isfinite(value) and value >= low):
            problems.append(f"{key}={value}: must be at least {low}; nearest: {low}")
    return problems


def _positive(cfg: Config, *keys: str) -> list[str]:
    values = ((key, getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1])) for key in keys)
    wrong = ((key, value) for key, value in values if not (math.isfinite(value) and value > 0))
    return [f"{key}={value}: must be a finite number above 0" for key, value in wrong]


def _fraction(key: str, value: float) -> list[str]:
    return [] if 0 <= value < 1 else [f"{key}={value}: must lie in [0, 1)"]


def _one_of(key: str, value: str, valid: tuple[str, ...]) -> list[str]:
    if value in valid:
        return []
    later = " is not built yet;" if value in LATER.get(key, ()) else ""
    return [f"{key}={value}:{later} valid: {', '.join(valid)}"]


def _model(cfg: Config) -> list[str]:
    m = cfg.model
    keys = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "loss_chunk_rows")
    problems = _at_least(cfg, 1, *(f"model.{key}" for key in keys))
    problems += _positive(cfg, "model.rope_base", "model.norm_eps", "model.init_std")
    problems += _at_least(cfg, 0, "model.z_loss")
    if problems:
        return problems
    problems += rope_problems(m.rope_scaling, m.rope_base)
    low, high = SOFTCAP_RANGE
    if m.softcap and not low <= m.softcap <= high:
        problems.append(f"model.softcap={m.softcap}: must be 0 (none) or from {low} to {high}; "
                        f"nearest: {high if m.softcap > high else low if m.softcap > 0 else 0}")
    if m.num_heads % m.num_kv_heads:
        problems.append(f"model.num_kv_heads={m.num_kv_heads}: must divide model.num_heads={m.num_heads}; "
                        f"nearest: {nearest(m.num_kv_heads, divisors(m.num_heads))}")
    if m.head_dim is None and m.dim % m.num_heads:
        problems.append(f"model.num_heads={m.num_heads}: must divide model.dim={m.dim} while model.head_dim is null; "
                        f"nearest: {nearest(m.num_heads, divisors(m.dim))}")
        return problems
    head_dim, origin = m.head_dim, ""
    if head_dim is None:
        head_dim, origin = m.dim // m.num_heads, " (model.dim / model.num_heads)"
    if head_dim < 2 or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        valid = list(range(2, MAX_HEAD_DIM + 1, 2))
        problems.append(f"model.head_dim={head_dim}{origin}: must be even (RoPE turns pairs) and at most {MAX_HEAD_DIM}; "
                        f"nearest: {nearest(head_dim, valid)}")
    return problems


def _data(cfg: Config) -> list[str]:
    return data_problems(cfg.data, cfg.model.vocab_size, cfg.train.accumulation)


def _attention(cfg: Config) -> list[str]:
    a = cfg.attention
    problems = _one_of("attention.layout", a.layout, LAYOUTS) + _one_of("attention.kernel", a.kernel, KERNELS)
    problems += _one_of("attention.exchange", a.exchange, EXCHANGES) + _one_of("attention.rotate", a.rotate, ROTATES)
    problems += _one_of("attention.routing", a.routing, ROUTINGS)
    window = list(a.window_size)
    if len(window) != 2:
        return [*problems, f"attention.window_size={window}: two numbers, [left, right]; e.g. [{max([*window, 0])},0]"]
    left, right = window
    if min(window) < -1:
        problems.append(f"attention.window_size={window}: each is at least 0, or -1 for unlimited; "
                        f"nearest: [{max(left, -1)},{max(right, -1)}]")
    elif right > 0:
        problems.append(f"attention.window_size={window}: attention is causal, so right is 0 or -1; nearest: [{left},0]")
    return problems + _layers(cfg, left)


def _layers(cfg: Config, left: int) -> list[str]:
    a, kinds = cfg.attention, list(cfg.attention.layers)
    problems = []
    for kind in dict.fromkeys(kinds):
        problems += _one_of("attention.layers", kind, LAYERS)
    depth = cfg.model.num_layers
    if len(kinds) > depth >= 1:
        problems.append(f"attention.layers={_listed(kinds)}: {len(kinds)} kinds, of which model.num_layers={depth} layers take "
                        f"the first {depth}; nearest: {_listed(kinds[:depth])}, or model.num_layers={len(kinds)}")
    if "window" in kinds and left == -1:
        problems.append(f"attention.layers={_listed(kinds)}: a window layer needs a window, attention.window_size has left=-1; "
                        "nearest: attention.window_size=[1023,0], or global layers")
    if kinds and "window" not in kinds and left >= 0:
        problems.append(f"attention.window_size={list(a.window_size)}: no layer of attention.layers={_listed(kinds)} takes it; "
                        "nearest: [-1,-1], or a window layer")
    if a.chunk_size is not None and a.chunk_size < 1:
        problems.append(f"attention.chunk_size={a.chunk_size}: must be at least 1, or null; nearest: 1")
    if "chunk" in kinds and a.chunk_size is None:
        problems.append(f"attention.layers={_listed(kinds)}: a chunk layer needs attention.chunk_size, e.g. "
                        "attention.chunk_size=8192")
    if "chunk" not in kinds and a.chunk_size is not None:
        problems.append(f"attention.chunk_size={a.chunk_size}: no layer of attention.layers={_listed(kinds)} takes it; "
                        "nearest: null, or attention.layers=[chunk]")
    if a.first_tokens < 0:
        problems.append(f"attention.first_tokens={a.first_tokens}: must be at least 0; nearest: 0")
    elif a.first_tokens and left == -1:
        problems.append(f"attention.first_tokens={a.first_tokens}: kept beside a window, attention.window_size has left=-1; "
                        "nearest: 0, or attention.window_size=[1023,0]")
    return problems


def _listed(words: list[str]) -> str:
    """As it is written on a command line."""
    return f"[{','.join(words)}]"


def _optim(cfg: Config) -> list[str]:
    o = cfg.optim
    problems = _one_of("optim.name", o.name, OPTIMIZERS) + _positive(cfg, "optim.lr", "optim.eps")
    problems += _at_least(cfg, 0, "optim.warmup_steps", "optim.weight_decay", "optim.grad_clip")
    for key in ("beta1", "beta2", "momentum"):
        problems += _fraction(f"optim.{key}", getattr(o, key))
    if not 0 <= o.min_lr_ratio <= 1:
        problems.append(f"optim.min_lr_ratio={o.min_lr_ratio}: must lie in [0, 1]")
    if o.name == "adamw" and o.momentum:
        problems.append(f"optim.momentum={o.momentum}: taken by optim.name=sgd only; adamw has optim.beta1={o.beta1}")
    if 0 < cfg.train.steps < o.warmup_steps:
        problems.append(f"optim.warmup_steps={o.warmup_steps}: must not exceed train.steps={cfg.train.steps}; "
                        f"nearest: {cfg.train.steps}")
    return problems


def _train(cfg: Config) -> list[str]:
    t = cfg.train
    problems = _at_least(cfg, 1, "train.steps", "train.accumulation", "train.log_every")
    problems += _at_least(cfg, 0, "train.eval_every", "train.eval_sequences", "train.seed") + _one_of("train.dtype", t.dtype, DTYPES)
    return problems


def _run(cfg: Config) -> list[str]:
    r = cfg.run
    problems = _one_of("run.device", r.device, DEVICES) + _positive(cfg, "parallel.timeout_s")
    problems += timeout_problems("parallel.timeout_s", cfg.parallel.timeout_s)
    if not r.name or any(c in r.name for c in "/\\\0 ") or r.name.startswith("."):
        problems.append(f"run.name={r.name!r}: becomes the name of a folder; letters, digits, -, _ and dots inside")
    if r.dir == "":
        problems.append("run.dir='': names no folder; nearest: null (a fresh one under run.root), or . for this one")
    if r.device == "cpu" and cfg.attention.exchange in ("nccl", "copy"):
        lacks = {"nccl": "NCCL", "copy": "copy engines"}[cfg.attention.exchange]
        problems.append(f"attention.exchange={cfg.attention.exchange}: run.device=cpu has no {lacks}; nearest: gloo or auto")
    return problems
