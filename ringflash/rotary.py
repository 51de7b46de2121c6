"""How rotary embedding is stretched beyond the length a model was trained at: `model.rope_scaling`, and its rules. No torch."""
from __future__ import annotations

import math
from dataclasses import dataclass

ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")
# Which of them take what; the rest must stay as it is, so that nothing is asked for in vain.
_TAKEN_BY = {
    "factor": ("linear", "llama3", "yarn"),
    "original_max_position_embeddings": ("llama3", "yarn"),
    "low_freq_factor": ("llama3",), "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",), "beta_slow": ("yarn",), "truncate": ("yarn",),
    "attention_factor": ("yarn",), "mscale": ("yarn",), "mscale_all_dim": ("yarn",),
}


@dataclass
class RopeScaling:
    """Names and defaults are those of Hugging Face's `rope_scaling`. A wavelength is the number of positions of one turn."""

    kind: str = "none"
    factor: float = 1.0  # how much longer: linear divides all frequencies by it, the others only low ones
    original_max_position_embeddings: int | None = None  # the length the model was trained at
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / this are divided by factor,
    high_freq_factor: float = 4.0  # those below original / this stay, between them it passes over evenly
    beta_fast: float = 32.0  # yarn: what turns more often than this over the original length stays,
    beta_slow: float = 1.0  # what turns less often than this is divided by factor, a ramp over the dims between
    truncate: bool = True  # yarn: the ramp's ends are whole dims
    attention_factor: float | None = None  # yarn: cos and sin are multiplied by it; null: from mscale
    mscale: float | None = None  # yarn: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1); null: mscale 1
    mscale_all_dim: float | None = None  # alone


def rope_problems(s: RopeScaling, base: float, key: str = "model.rope_scaling") -> list[str]:
    """A line for each broken rule: dotted key and value, the rule, the nearest valid values."""
    if s.kind not in ROPE_SCALINGS:
        return [f"{key}.kind={s.kind}: valid: {', '.join(ROPE_SCALINGS)}"]
    problems, plain = [], RopeScaling()
    for name, kinds in _TAKEN_BY.items():
        if s.kind not in kinds and getattr(s, name) != getattr(plain, name):
            default = getattr(plain, name)
            problems.append(f"{key}.{name}={getattr(s, name)}: taken by kind {' or '.join(kinds)}, {key}.kind is {s.kind}; "
                            f"nearest: {'null' if default is None else default}, or {key}.kind={kinds[0]}")
    if problems or s.kind == "none":
        return problems
    if not (math.isfinite(s.factor) and s.factor >= 1):
        problems.append(f"{key}.factor={s.factor}: must be a finite number of at least 1; nearest: 1.0")
    original = s.original_max_position_embeddings
    if s.kind in _TAKEN_BY["original_max_position_embeddings"] and (original is None or original < 1):
        problems.append(f"{key}.original_max_position_embeddings={'null' if original is None else original}: kind {s.kind} needs "
                        "the length that the model was trained at, at least 1; e.g. 8192")
    if s.kind == "llama3":
        problems += _ordered(s, key, "low_freq_factor", "high_freq_factor")
    if s.kind == "yarn":
        problems += _ordered(s, key, "beta_slow", "beta_fast")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(s, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                problems.append(f"{key}.{name}={value}: must be a finite number above 0, or null; nearest: null")
        if (s.mscale is None) != (s.mscale_all_dim is None):
            given, other = ("mscale", "mscale_all_dim") if s.mscale_all_dim is None else ("mscale_all_dim", "mscale")
            problems.append(f"{key}.{given}={getattr(s, given)}: mscale and mscale_all_dim go together, {key}.{other} is null; "
                            "nearest: both null, or both given")
        if not base > 1:
            problems.append(f"model.rope_base={base}: {key}.kind=yarn needs a base above 1; e.g. 10000.0")
    return problems


def _ordered(s: RopeScaling, key: str, low: str, high: str) -> list[str]:
    """0 < low < high, both finite."""
    below, above = getattr(s, low), getattr(s, high)
    if not (math.isfinite(below) and below > 0):
        return [f"{key}.{low}={below}: must be a finite number above 0; nearest: {getattr(RopeScaling(), low)}"]
    if not (math.isfinite(above) and above > below):
        return [f"{key}.{high}={above}: must be a finite number above {key}.{low}={below}; nearest: "
                f"{max(getattr(RopeScaling(), high), 2 * below)}"]
    return []
