"""Every configuration file composes, is valid, and does what it says; a typo or a wrong type never gets past composing."""
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringflash.config import Config, ModelConfig, validate
from ringflash.launch.train import misspelt, register_schema, to_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = ("model", "data", "attention", "parallel", "optim", "train", "eval", "checkpoint", "run")
FILES = sorted(p.relative_to(CONFIGS).with_suffix("") for p in CONFIGS.rglob("*.yaml") if p.parent != CONFIGS)
EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
DEBUGS = sorted(p.stem for p in (CONFIGS / "debug").glob("*.yaml"))
# What a file leaves to the user on purpose.
NEEDED = {"data/files": ["data.path=somewhere"], "model/hf": ["model.hf=somewhere"]}


def composed(*overrides: str) -> Config:
    register_schema()
    with initialize_config_module("ringflash.configs", version_base="1.3"):
        return OmegaConf.to_object(compose("train", overrides=list(overrides)))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_composes_and_is_valid(file):
    cfg = composed(f"{file.parent}={file.name}", *NEEDED.get(str(file), []))
    assert isinstance(cfg, Config)
    world_size = cfg.parallel.nproc or 4
    dp, cp = validate(cfg, world_size)
    assert dp * cp == world_size


def test_a_model_of_transformers_that_is_not_named_is_asked_for_and_no_model_of_ours_is_trained_instead():
    register_schema()
    with initialize_config_module("ringflash.configs", version_base="1.3"):
        with pytest.raises(ValueError, match="model.hf='': names no model"):
            to_config(compose("train", overrides=["model=hf"]))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("debug", DEBUGS)
def test_debug_profiles_shorten_every_experiment(experiment, debug):
    plain, short = composed(f"experiment={experiment}"), composed(f"experiment={experiment}", f"debug={debug}")
    validate(short, short.parallel.nproc)
    assert short.train.steps < plain.train.steps and short.data.seq_len < plain.data.seq_len
    assert short.model == plain.model and short.run.name == "debug"


def test_every_group_of_the_schema_is_a_folder_and_nothing_else_is():
    folders = {p.name for p in CONFIGS.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert folders == {*GROUPS, "experiment", "debug"}


def test_an_experiment_overrides_the_groups_and_the_command_line_overrides_the_experiment():
    default, quickstart = composed(), composed("experiment=quickstart")
    assert quickstart.run.name == "quickstart" and quickstart.parallel.nproc == 2
    assert (quickstart.model, quickstart.data.seq_len) != (default.model, default.data.seq_len)
    assert composed("experiment=quickstart", "data.seq_len=77", "train.steps=20").data.seq_len == 77
    assert composed("model=base", "experiment=quickstart").model.dim == 1024


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_file_starts_with_its_command(experiment):
    lines = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# python launch/train.py {'-m ' if experiment.startswith('sweep_') else ''}experiment={experiment}"


@pytest.mark.parametrize("override", ["model.dmodel=3", "parallel.tp=2", "trainer.steps=1", "data.seq_len=abc",
                                      "data.seq_len=1e6", "train.steps=2.5", "attention.deterministic=maybe",
                                      "attention.window_size=[a,0]"])
def test_a_typo_or_a_wrong_type_fails_while_composing(override):
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert override.split("=")[0].split(".")[0] in str(caught.value)


def test_an_unknown_file_fails_and_the_message_lists_the_files_there_are():
    with pytest.raises(Exception, match="quickstart"):
        composed("experiment=quickstar")


def test_underscores_in_numbers_are_read():
    assert composed("data.seq_len=1_048_576").data.seq_len == 1048576


def test_a_misspelt_key_is_answered_with_the_nearest_ones():
    (hint,) = misspelt(["experiment=quickstart", "model.dmodel=3", "train.steps=4", "hydra.run.dir=x"])
    assert hint.startswith("model.dmodel: no such key; nearest: ") and "model.dim" in hint


def test_names_that_configuration_repeats_are_those_of_the_parts_that_own_them():
    # ringflash.config imports neither torch nor numpy, so it repeats them.
    import dataclasses

    from ringflash import config, data, layout, model
    from ringflash.kernels import dispatch
    from ringflash.ring import routes

    assert config.KERNELS == dispatch.KERNELS
    assert config.LAYOUTS == layout.LAYOUTS
    assert config.ROUTINGS == ("auto", *routes.ROUTINGS)
    assert config.NUM_TOKENS == data.VOCAB_SIZE
    theirs = {f.name: f.default for f in dataclasses.fields(model.ModelConfig) if f.default is not dataclasses.MISSING}
    ours = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    assert ours.keys() == {f.name for f in dataclasses.fields(model.ModelConfig)} | {"hf", "weights"}
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("override", ["+train.foo=1", "++foo=1", "+data.paths=x"])
def test_a_key_that_was_added_by_force_is_refused_before_a_folder_or_a_rank_exists(override):
    register_schema()
    with initialize_config_module("ringflash.configs", version_base="1.3"):
        forced = compose("train", overrides=[override])
    with pytest.raises(OmegaConfBaseException, match="not in"):
        to_config(forced)
