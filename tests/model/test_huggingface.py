"""Hugging Face folders: logits are those of transformers, nothing is lost there and back, what does not fit is refused."""
import json
import os
import zlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ringflash.model import ModelConfig, Transformer
from ringflash.model.huggingface import (SINGLE, config_from_huggingface, config_to_huggingface, load_huggingface, names,
                                         save_huggingface)
from ringflash.rotary import RopeScaling

CONFIG = ModelConfig(vocab_size=97, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=16, rope_base=5e5,
                     init_std=0.2)
QWEN = replace(CONFIG, qk_norm=True, head_dim=32, norm_eps=1e-6, rope_base=1e6)
LLAMA3 = RopeScaling("llama3", factor=8.0, original_max_position_embeddings=32)
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32)
CASES = {
    "llama": CONFIG, "llama, tied": replace(CONFIG, tie_embeddings=True), "llama 3.1": replace(CONFIG, rope_scaling=LLAMA3),
    "llama, linear": replace(CONFIG, rope_scaling=RopeScaling("linear", factor=3.0)),
    "qwen3": QWEN, "qwen3, tied": replace(QWEN, tie_embeddings=True), "qwen3, yarn": replace(QWEN, rope_scaling=YARN),
    "yarn with all": replace(QWEN, rope_scaling=replace(YARN, beta_fast=16.0, mscale=0.8, mscale_all_dim=1.1, truncate=False)),
}
TOKENS = torch.randint(0, 97, (2, 100), generator=torch.Generator().manual_seed(1))


def attend(q, k, v, *, layout, mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def model(config, state=None):
    made = Transformer(config, attend, seed=5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # norms of ones would hide one that is taken for another
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(1 + torch.randn(parameter.shape, generator=generator) / 4)
    if state is not None:
        made.load_state_dict(state)
    return made


@torch.no_grad()
def logits(made):
    return made(TOKENS, torch.arange(TOKENS.shape[1])) @ made.head.weight.t()


@pytest.mark.parametrize("name", CASES)
def test_our_export_gives_the_same_logits_in_transformers_and_its_own_files_come_back_to_the_bit(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    config, ours = CASES[name], model(CASES[name])
    save_huggingface(tmp_path / "ours", config, ours.state_dict(), max_position_embeddings=128)
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
    assert expected.abs().max() > 1 and (logits(ours) - expected).abs().max() < 5e-5 * expected.abs().max()
    theirs.save_pretrained(tmp_path / "theirs")
    back, state = load_huggingface(tmp_path / "theirs")
    assert back == replace(config, head_dim=config.resolved_head_dim)
    for key, value in ours.state_dict().items():
        assert torch.equal(state[key], value), key
    assert torch.equal(logits(model(back, state)), logits(ours))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_random_model_of_transformers_has_the_same_logits_here(kind, shards, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        head_dim=24, initializer_range=0.2)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "50KB"} if shards else {}))
    assert (tmp_path / SINGLE).is_file() != shards
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    got = logits(model(*load_huggingface(tmp_path)))
    assert expected.abs().max() > 1 and (got - expected).abs().max() < 5e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_export_and_import_change_no_bit_and_leave_no_part(name, tmp_path):
    pytest.importorskip("safetensors")
    ours = model(CASES[name])
    save_huggingface(tmp_path, CASES[name], ours.state_dict(), max_position_embeddings=128)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE]
    config, state = load_huggingface(tmp_path)
    assert config == CASES[name] and state.keys() == ours.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in ours.state_dict().items())
    save_huggingface(tmp_path, CASES[name], ours.state_dict(), max_position_embeddings=128, dtype=torch.bfloat16)
    assert {value.dtype for value in load_huggingface(tmp_path)[1].values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", CASES)
def test_sizes_survive_config_json_and_every_weight_has_one_name(name):
    values = json.loads(json.dumps(config_to_huggingface(CASES[name], max_position_embeddings=128)))
    assert config_from_huggingface(values) == CASES[name]
    mapped = names(CASES[name])
    assert mapped.keys() == {key for key, _ in model(CASES[name]).named_parameters()} and len(set(mapped.values())) == len(mapped)


def test_the_older_form_of_config_json_is_read_as_well():
    values = config_to_huggingface(CASES["llama 3.1"], max_position_embeddings=128)
    del values["rope_parameters"]
    assert config_from_huggingface(values) == CASES["llama 3.1"]
    values["rope_scaling"] = None
    assert config_from_huggingface(values) == CASES["llama"]
    values["rope_scaling"] = {"type": "linear", "factor": 3.0}
    assert config_from_huggingface(values) == CASES["llama, linear"]
    values["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    assert config_from_huggingface(values).rope_scaling == replace(YARN, original_max_position_embeddings=128)
    assert config_from_huggingface(values, rope_scaling=LLAMA3).rope_scaling == LLAMA3


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "mistral"}, "model_type=mistral: valid: llama, qwen3"), ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ({"attention_bias": True}, "attention_bias=True"), ({"mlp_bias": True}, "mlp_bias=True"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type=longrope"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "surprise": 1}}, "surprise"),
    ({"num_key_value_heads": 3}, "model.num_kv_heads=3"), ({"hidden_size": None}, "hidden_size is missing"),
])
def test_a_model_that_is_not_ours_is_refused_by_its_key(change, message):
    values = config_to_huggingface(CONFIG, max_position_embeddings=128) | change
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(values)


@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"sinks": True}])
def test_what_neither_format_has_is_not_exported(change):
    with pytest.raises(ValueError, match=f"model.{next(iter(change))}="):
        config_to_huggingface(replace(CONFIG, **change), max_position_embeddings=128)


def test_weights_that_are_missing_or_unknown_are_named(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    ours = model(CONFIG)
    save_huggingface(tmp_path, CONFIG, ours.state_dict(), max_position_embeddings=128)
    weights = safetensors.load_file(tmp_path / SINGLE)
    weights["model.layers.0.self_attn.q_proj.bias"] = weights.pop("model.norm.weight")
    safetensors.save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"missing model.norm.weight; unknown model.layers.0.self_attn.q_proj.bias"):
        load_huggingface(tmp_path)
    os.truncate(tmp_path / SINGLE, 3000)
    with pytest.raises(ValueError, match="model.safetensors is cut short or damaged"):
        load_huggingface(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_huggingface(tmp_path)
    with pytest.raises(ValueError, match="layers.2"):
        save_huggingface(tmp_path, replace(CONFIG, num_layers=2), ours.state_dict(), max_position_embeddings=128)
