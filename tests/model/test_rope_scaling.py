"""Stretched rotary embeddings against formulas written out pair by pair, and against transformers' own where it is installed."""
import math
from dataclasses import replace

import pytest
import torch

from ringflash.config import Config, validate
from ringflash.model import ModelConfig, Transformer
from ringflash.model.rope import attention_factor, rope_cos_sin, rope_frequencies
from ringflash.rotary import RopeScaling

LLAMA = RopeScaling("llama3", factor=8.0, original_max_position_embeddings=8192)
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32768)
CASES = {
    "none": (RopeScaling(), 128, 10000.0),
    "linear": (RopeScaling("linear", factor=2.5), 64, 10000.0),
    "llama 3.1": (LLAMA, 128, 500000.0),
    "llama 3.2": (replace(LLAMA, factor=32.0), 64, 500000.0),
    "llama, other bounds": (replace(LLAMA, low_freq_factor=2.0, high_freq_factor=16.0), 32, 10000.0),
    "qwen 3 yarn": (YARN, 128, 1000000.0),
    "yarn, bounds between dims": (replace(YARN, beta_fast=16.0, beta_slow=2.0, truncate=False), 64, 10000.0),
    "yarn, short": (replace(YARN, original_max_position_embeddings=64), 16, 10000.0),
    "yarn, mscale": (replace(YARN, factor=40.0, mscale=0.707, mscale_all_dim=1.2), 64, 10000.0),
    "yarn, given factor": (replace(YARN, attention_factor=1.25), 64, 10000.0),
    "yarn, factor 1": (replace(YARN, factor=1.0), 64, 10000.0),
}


def by_hand(scaling, head_dim, base):
    """Frequency of each pair, from wavelengths and turns, in Python floats."""
    found = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * i / head_dim)
        length = scaling.original_max_position_embeddings
        if scaling.kind == "none":
            stretch = 0.0
        elif scaling.kind == "linear":
            stretch = 1.0
        elif scaling.kind == "llama3":
            if wavelength < length / scaling.high_freq_factor:
                stretch = 0.0
            elif wavelength > length / scaling.low_freq_factor:
                stretch = 1.0
            else:
                stretch = (scaling.high_freq_factor - length / wavelength) / (scaling.high_freq_factor - scaling.low_freq_factor)
        else:
            ends = [head_dim / 2 * math.log(length / (2 * math.pi * turns), base)
                    for turns in (scaling.beta_fast, scaling.beta_slow)]
            if scaling.truncate:
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            ends = [max(ends[0], 0), min(ends[1], head_dim - 1)]
            stretch = min(max((i - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)
        kept = 2 * math.pi / wavelength
        found.append(stretch * kept / scaling.factor + (1 - stretch) * kept)
    return found


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_the_formulas(name):
    got = rope_frequencies(CASES[name][1], CASES[name][2], CASES[name][0])
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(by_hand(*CASES[name]), rel=1e-12)


def test_each_kind_but_none_changes_some_frequencies_and_yarn_and_llama3_keep_the_highest():
    for name, (scaling, head_dim, base) in CASES.items():
        plain, got = rope_frequencies(head_dim, base), rope_frequencies(head_dim, base, scaling)
        assert bool((plain != got).any()) == (scaling.kind != "none" and scaling.factor != 1.0), name
        if scaling.kind in ("llama3", "yarn") and name != "yarn, short":
            assert got[0] == plain[0] and math.isclose(got[-1], plain[-1] / scaling.factor, rel_tol=1e-12), name


@pytest.mark.parametrize(("name", "factor"), [("linear", 1.0), ("llama 3.1", 1.0), ("qwen 3 yarn", 0.1 * math.log(4) + 1), (
    "yarn, mscale", (0.0707 * math.log(40) + 1) / (0.12 * math.log(40) + 1)), ("yarn, given factor", 1.25),
    ("yarn, factor 1", 1.0)])
def test_cos_and_sin_carry_the_attention_factor_and_are_exact_near_one_million(name, factor):
    scaling, head_dim, base = CASES[name]
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)
    positions = torch.tensor([0, 1, 8191, 1_048_575])
    cos, sin = rope_cos_sin(positions, head_dim, base, scaling)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(by_hand(scaling, head_dim, base)):
            assert abs(cos[row, i].item() - factor * math.cos(position * frequency)) < 1e-6
            assert abs(sin[row, i].item() - factor * math.sin(position * frequency)) < 1e-6


@pytest.mark.parametrize("name", [name for name in CASES if name != "none"])
def test_frequencies_and_factor_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, head_dim, base = CASES[name]
    taken = {"linear": ["factor"],
             "llama3": ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]}
    keys = taken.get(scaling.kind, ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
                                    "attention_factor", "mscale", "mscale_all_dim"])
    parameters = {key: getattr(scaling, key) for key in keys if getattr(scaling, key) is not None}
    parameters |= {"rope_type": scaling.kind, "rope_theta": base}
    config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
                                      rope_parameters=parameters, max_position_embeddings=131072)
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    # Theirs are fp32.
    torch.testing.assert_close(rope_frequencies(head_dim, base, scaling), theirs.double(), rtol=2e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)


def test_the_model_turns_by_its_configs_scaling():
    config = ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, init_std=0.5)
    tokens, positions = torch.arange(9)[None] % 7, torch.arange(9)

    def product(q, k, v, *, layout, mask=None):
        return torch.cumsum(q * k, 1) * v + q

    def hidden(scaling):
        return Transformer(replace(config, rope_scaling=scaling), product)(tokens, positions)

    plain = hidden(RopeScaling())
    assert not torch.allclose(plain, hidden(RopeScaling("linear", factor=2.0)))
    assert torch.equal(plain, hidden(RopeScaling("linear", factor=1.0)))


K = "model.rope_scaling"
RULES = [
    (RopeScaling("ntk"), f"{K}.kind=ntk: valid: none, linear, llama3, yarn"),
    (RopeScaling(factor=4.0), f"{K}.factor=4.0: taken by kind linear or llama3 or yarn, {K}.kind is none; nearest: 1.0, or "
     f"{K}.kind=linear"),
    (RopeScaling("linear", factor=2.0, mscale=1.0), f"{K}.mscale=1.0: taken by kind yarn, {K}.kind is linear; nearest: null, or"),
    (RopeScaling("linear", factor=0.5), f"{K}.factor=0.5: must be a finite number of at least 1; nearest: 1.0"),
    (RopeScaling("linear", factor=math.nan), f"{K}.factor=nan: must be a finite number of at least 1; nearest: 1.0"),
    (RopeScaling("yarn", factor=4.0), f"{K}.original_max_position_embeddings=null: kind yarn needs the length"),
    (replace(LLAMA, original_max_position_embeddings=0), f"{K}.original_max_position_embeddings=0: kind llama3 needs the length"),
    (replace(LLAMA, low_freq_factor=4.0), f"{K}.high_freq_factor=4.0: must be a finite number above {K}.low_freq_factor=4.0; "
     "nearest: 8.0"),
    (replace(YARN, beta_slow=0.0), f"{K}.beta_slow=0.0: must be a finite number above 0; nearest: 1.0"),
    (replace(YARN, attention_factor=-1.0), f"{K}.attention_factor=-1.0: must be a finite number above 0, or null; nearest: null"),
    (replace(YARN, mscale=1.0), f"{K}.mscale=1.0: mscale and mscale_all_dim go together, {K}.mscale_all_dim is null; "
     "nearest: both"),
]


@pytest.mark.parametrize(("scaling", "message"), RULES, ids=[message for _, message in RULES])
def test_a_broken_rule_names_key_value_rule_and_nearest_values(scaling, message):
    cfg = Config()
    cfg.model.rope_scaling = scaling
    with pytest.raises(ValueError) as caught:
        validate(cfg, 1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    config = ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, rope_scaling=scaling)
    with pytest.raises(ValueError) as caught:
        config.validate()
    assert str(caught.value).startswith(message)


def test_yarn_needs_a_base_above_1():
    cfg = Config()
    cfg.model.rope_scaling, cfg.model.rope_base = YARN, 1.0
    with pytest.raises(ValueError, match=r"^model.rope_base=1.0: model.rope_scaling.kind=yarn needs a base above 1"):
        validate(cfg, 1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_let_through(name):
    cfg = Config()
    cfg.model.rope_scaling, cfg.model.rope_base = CASES[name][0], CASES[name][2]
    assert validate(cfg, 1) == (1, 1)
