"""model.weights: a model begins with exactly what a folder holds, or the folder is refused by the name of what differs."""
import dataclasses
import logging

import pytest
import torch
from omegaconf import OmegaConf

from ringflash.config import Config, ModelConfig
from ringflash.model.build import build_model, model_config
from ringflash.model.huggingface import save_huggingface
from ringflash.model.weights import check_folder, load_weights
from ringflash.rotary import RopeScaling

SIZES = dict(vocab_size=31, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40)


def config(weights=None, **changes) -> Config:
    return Config(model=ModelConfig(**SIZES | changes, weights=None if weights is None else str(weights)))


def saved(folder, cfg: Config, seed: int = 5) -> dict[str, torch.Tensor]:
    """weights.pt and model.yaml as convert.py writes them."""
    state = build_model(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, seed=seed)), None).state_dict()
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "weights.pt")
    OmegaConf.save(OmegaConf.create(dataclasses.asdict(model_config(cfg))), folder / "model.yaml")
    return state


def loaded(cfg: Config) -> dict[str, torch.Tensor]:
    model = build_model(cfg, None)
    load_weights(cfg, model)
    return model.state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_folder_replace_those_that_were_drawn_to_the_bit(tmp_path, tied):
    state = saved(tmp_path, config(tie_embeddings=tied))
    cfg = config(tmp_path, tie_embeddings=tied)
    check_folder(cfg)
    found = loaded(cfg)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    drawn = build_model(cfg, None).state_dict()
    assert not torch.equal(drawn["embedding.weight"], state["embedding.weight"])
    assert not tied or found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"qk_norm": True}])
def test_a_folder_of_safetensors_needs_no_conversion(tmp_path, changes):
    pytest.importorskip("safetensors")
    state = build_model(config(**changes), None).state_dict()
    save_huggingface(tmp_path, model_config(config(**changes)), state, max_position_embeddings=64)
    cfg = config(tmp_path, **changes)
    check_folder(cfg)
    found = loaded(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, seed=9)))
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_sixteen_bit_weights_become_fp32_ones_of_the_same_value(tmp_path):
    state = saved(tmp_path, config())
    torch.save({name: value.bfloat16() for name, value in state.items()}, tmp_path / "weights.pt")
    found = loaded(config(tmp_path))
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], state[name].bfloat16().float()) for name in state)


@pytest.mark.parametrize("changes, told", [
    ({"num_layers": 3}, "missing: layers.2.attention.wk.weight, .* and 6 more"), ({"num_layers": 1}, "unknown: layers.1"),
    ({"vocab_size": 32}, r"of another shape: embedding.weight \[31, 24\] there, \[32, 24\] here"), ({"sinks": True}, "missing: .*sinks"),
    ({"num_heads": 2, "head_dim": 12, "num_kv_heads": 1}, "model.num_heads=2: they are of a model with 4"),
    ({"norm_eps": 1e-6}, "model.norm_eps=1e-06: they are of a model with 1e-05"),
    ({"softcap": 20.0}, "model.softcap=20.0: they are of a model with 0.0")])
def test_what_differs_is_refused_by_name_before_a_weight_is_written(tmp_path, changes, told):
    saved(tmp_path, config())
    cfg = config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"model.weights=.*{told}"):
        check_folder(cfg)
    model = build_model(cfg, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=told):
        load_weights(cfg, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rope_that_was_stretched_on_purpose_is_taken_and_told(tmp_path, caplog):
    saved(tmp_path, config())
    with caplog.at_level(logging.WARNING, logger="ringflash"):
        check_folder(config(tmp_path, rope_base=5e5, rope_scaling=RopeScaling("linear", factor=4.0)))
    assert "model.rope_base=500000.0" in caplog.text and "were trained with 10000.0" in caplog.text and "factor=4.0" in caplog.text


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has neither weights.pt nor config.json"):
        check_folder(config(tmp_path))


def test_a_torn_file_is_refused_by_its_name(tmp_path):
    saved(tmp_path, config())
    whole = (tmp_path / "weights.pt").read_bytes()
    for kept in (b"", b"torn", whole[:len(whole) // 2]):
        (tmp_path / "weights.pt").write_bytes(kept)
        with pytest.raises(ValueError, match="model.weights=.*weights.pt is torn"):
            check_folder(config(tmp_path))


def test_half_of_a_safetensors_file_is_refused_by_its_name(tmp_path):
    pytest.importorskip("safetensors")
    save_huggingface(tmp_path, model_config(config()), build_model(config(), None).state_dict(), max_position_embeddings=64)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ValueError, match="model.weights=.*model.safetensors: "):
        check_folder(config(tmp_path))
