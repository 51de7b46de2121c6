"""launch/convert.py: a run's weights go to a Hugging Face folder and come back to the bit; what is wrong is said in one line."""
import dataclasses
import os

import pytest
import torch
from omegaconf import OmegaConf

from ringflash.config import Config
from ringflash.launch.convert import main
from ringflash.model import Transformer
from ringflash.train.record import save_weights
from ringflash.train.trainer import model_config


def run_folder(folder, *, window: int = -1, **model):
    cfg = Config()
    cfg.attention.window_size = [window, -1]
    cfg.model = dataclasses.replace(cfg.model, dim=32, num_layers=2, ffn_dim=48, head_dim=8, **model)
    made = Transformer(model_config(cfg), lambda q, k, v, *, layout, mask=None: q)
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(cfg), folder / ".hydra" / "config.yaml")
    save_weights(folder / "weights.pt", made.state_dict())
    return cfg, made.state_dict()


@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True}, {"qk_norm": True}], ids=str)
def test_exported_and_imported_again_a_run_has_the_same_weights_and_sizes(model, tmp_path, capsys):
    pytest.importorskip("safetensors")
    cfg, state = run_folder(tmp_path / "run", **model)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = sum(p.numel() for p in Transformer(model_config(cfg), None).parameters())
    assert [line.split()[0] for line in lines] == [f"{count:,}"] * 2
    back = torch.load(tmp_path / "back" / "weights.pt", weights_only=True)
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())
    sizes = OmegaConf.merge(OmegaConf.structured(Config).model, OmegaConf.load(tmp_path / "back" / "model.yaml"))
    assert OmegaConf.to_object(sizes) == cfg.model
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    assert "config.json exists" in capsys.readouterr().err


def test_what_is_wrong_is_one_line_and_nothing_is_written(tmp_path, capsys):
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "hf")]) == 2
    assert "no finished run; it has no .hydra/config.yaml" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "none"), str(tmp_path / "back")]) == 2
    assert "config.json" in capsys.readouterr().err
    run_folder(tmp_path / "run", sinks=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    said = capsys.readouterr().err
    assert "model.sinks=True" in said and said.count("\n") == 1
    run_folder(tmp_path / "window", window=255)
    assert main(["export", str(tmp_path / "window"), str(tmp_path / "hf")]) == 2
    assert "attention.window_size=[255, -1]" in capsys.readouterr().err
    os.truncate(tmp_path / "window" / "weights.pt", 2000)
    assert main(["export", str(tmp_path / "window"), str(tmp_path / "hf")]) == 2
    assert "weights.pt is torn or no torch file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "window"]
