"""Weights that went to a Hugging Face folder and back train on as the originals do: one step of plain SGD, to the bit."""
import dataclasses

import pytest
import torch
from omegaconf import OmegaConf
from train_ranks import text, tiny

from ringflash.config import ModelConfig
from ringflash.launch import convert
from ringflash.train.trainer import Trainer
from ringflash.train.world import single

CASES = {"llama": {}, "llama, tied": {"tie_embeddings": True}, "qwen3": {"qk_norm": True, "num_kv_heads": 1}}


def config(name: str):
    cfg = tiny(accumulation=2)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **CASES[name]))


def step_of(cfg, world, state: dict[str, torch.Tensor]) -> dict:
    trainer = Trainer(cfg, world, text(cfg))
    trainer.model.load_state_dict(state)
    result = trainer.train_step(0)
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return {"figures": (result.loss, float(result.grad_norm)), "weights": weights}


def there_and_back(tmp_path, name: str) -> tuple[dict, dict, ModelConfig]:
    """(the weights of a run after two steps, the same through safetensors, what the imported model.yaml says)"""
    cfg, run = config(name), tmp_path / "run"
    trainer = Trainer(cfg, single(), text(cfg))
    for step in range(2):
        trainer.train_step(step)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    torch.save({k: v.detach().clone() for k, v in trainer.model.state_dict().items()}, run / "weights.pt")
    assert convert.main(["export", str(run), str(tmp_path / "theirs")]) == 0
    assert convert.main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    sizes = OmegaConf.load(tmp_path / "ours" / "model.yaml")
    named = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), sizes))
    return torch.load(run / "weights.pt"), torch.load(tmp_path / "ours" / "weights.pt"), named


@pytest.mark.parametrize("name", CASES)
def test_a_step_from_exported_and_imported_weights_is_that_of_the_originals_to_the_bit(tmp_path, name):
    pytest.importorskip("safetensors")
    before, after, named = there_and_back(tmp_path, name)
    cfg = config(name)
    assert dataclasses.replace(named, loss_chunk_rows=7, init_std=cfg.model.init_std) == cfg.model
    plain, converted = (step_of(cfg, single(), state) for state in (before, after))
    assert plain["figures"] == converted["figures"] and plain["figures"][1] > 0
    assert plain["weights"].keys() == converted["weights"].keys()
    assert all(torch.equal(plain["weights"][key], converted["weights"][key]) for key in plain["weights"])
    assert any(not torch.equal(plain["weights"][key], before[key]) for key in before), "the step changed nothing"

