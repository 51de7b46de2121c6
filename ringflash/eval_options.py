"""The options of evaluation and their rules: a part of ringflash.config, without torch and numpy as that is."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

TASKS = ("text", "passkey")
FILLERS = ("text", "random")
LABELS = ("answer", "all")
ON_NONFINITE = ("stop", "skip")


@dataclass
class PasskeyConfig:
    """A key that is said once in a long text and asked for at its end: what evaluation asks, and data.task=passkey trains on."""

    lengths: list[int] = field(default_factory=list)  # tokens per sample; []: evaluation leaves the task out
    depths: int = 5  # places of the key, spread evenly from the start of the text to its end
    samples: int = 8  # per length and depth
    key_tokens: int = 5  # all different
    prompt: str = "The pass key is "  # before the key, where it is said and where it is asked for
    alphabet: str = "0123456789"  # of the key, a token for each
    filler: str = "text"  # the rest: text, the run's own; or random, tokens that are in no prompt and no key
    # Training packs texts of these lengths into a sample, as documents: short ones are learnt first, and carry over. []: a sample
    # is one text.
    packed: list[int] = field(default_factory=list)
    labels: str = "answer"  # where training on the task has a loss: answer, or all


@dataclass
class EvalConfig:
    """What evaluation measures beside the held-out loss (when: train.eval_every, on how much: train.eval_sequences)."""

    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)


def eval_problems(cfg) -> list[str]:
    """A line for each broken rule of a Config. What the vocabulary shows is checked where the data is opened."""
    p, t = cfg.eval.passkey, cfg.train
    problems = [f"eval.passkey.{key}={getattr(p, key)}: must be at least 1; nearest: 1"
                for key in ("depths", "samples", "key_tokens") if getattr(p, key) < 1]
    for key, value, valid in (("data.task", cfg.data.task, TASKS), ("eval.passkey.filler", p.filler, FILLERS),
                              ("eval.passkey.labels", p.labels, LABELS), ("train.on_nonfinite", t.on_nonfinite, ON_NONFINITE)):
        if value not in valid:
            problems.append(f"{key}={value}: valid: {', '.join(valid)}")
    if any(not isinstance(length, int) or length < 2 for length in p.lengths):
        problems.append(f"eval.passkey.lengths={list(p.lengths)}: each is a number of tokens, at least 2")
    if any(length < 2 for length in p.packed):
        problems.append(f"eval.passkey.packed={list(p.packed)}: each is a number of tokens, at least 2")
    if p.packed and cfg.data.task == "passkey" and not cfg.data.document_mask:
        problems.append(f"eval.passkey.packed={list(p.packed)}: packed texts are documents, data.document_mask=false would let "
                        "them see each other; nearest: [], or data.document_mask=true")
    if p.packed and max(p.packed) > cfg.data.seq_len:
        problems.append(f"eval.passkey.packed={list(p.packed)}: must fit into data.seq_len={cfg.data.seq_len}; nearest: "
                        f"{sorted({min(length, cfg.data.seq_len) for length in p.packed})}")
    if not p.prompt:
        problems.append("eval.passkey.prompt='': says nothing; e.g. eval.passkey.prompt='The pass key is '")
    if len(set(p.alphabet)) < 2:
        problems.append(f"eval.passkey.alphabet={p.alphabet!r}: a key is drawn from at least two characters, e.g. 0123456789")
    elif p.key_tokens > len(set(p.alphabet)):
        problems.append(f"eval.passkey.key_tokens={p.key_tokens}: a key's tokens are all different, and eval.passkey.alphabet "
                        f"has {len(set(p.alphabet))}; nearest: {len(set(p.alphabet))}")
    if p.lengths and t.eval_sequences == 0:
        problems.append(f"eval.passkey.lengths={list(p.lengths)}: train.eval_sequences=0 evaluates nothing; nearest: "
                        "train.eval_sequences=1, or eval.passkey.lengths=[]")
    if t.max_skipped < 1:
        problems.append(f"train.max_skipped={t.max_skipped}: must be at least 1; nearest: 1, or train.on_nonfinite=stop")
    return problems + _showing(t)


def _showing(t) -> list[str]:
    problems = []
    for key in ("profile", "profile_after"):
        if getattr(t, key) < 0:
            problems.append(f"train.{key}={getattr(t, key)}: a number of steps, at least 0; nearest: 0")
    if t.profile > 0 and t.profile_after + t.profile > t.steps:
        last = t.profile_after + t.profile
        problems.append(f"train.profile={t.profile}: with train.profile_after={t.profile_after} that is step "
                        f"{t.profile_after + 1} to {last} of train.steps={t.steps}; nearest: "
                        f"train.profile={min(t.profile, t.steps)} train.profile_after={max(0, t.steps - t.profile)}")
    if t.profile > 0 and not t.profile_ranks:
        problems.append(f"train.profile={t.profile}: train.profile_ranks=[] names no rank whose steps to write; nearest: [0]")
    if t.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append("train.tensorboard=true: the package tensorboard is not installed here; nearest: false (metrics.jsonl "
                        "has the same figures), or pip install tensorboard")
    return problems


def profile_problems(ranks: list[int], world_size: int) -> list[str]:
    """Of train.profile_ranks."""
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if not wrong or world_size < 1:
        return []
    return [f"train.profile_ranks={list(ranks)}: this run has ranks 0 to {world_size - 1}; nearest: "
            f"{sorted({min(max(rank, 0), world_size - 1) for rank in ranks})}"]
