"""model=hf: the training loop over a model of transformers is the same on one rank and on two, sharded or not; the weights of a
folder."""
import dataclasses
import functools
import json

import pytest
import torch

pytest.importorskip("transformers")

from train_ranks import run_ranks, text, tiny, with_train  # noqa: E402

from transformers import AutoModelForCausalLM  # noqa: E402

from ringflash import Layout, Mask, ring_attention, shard_batch  # noqa: E402
from ringflash.config import ModelConfig, validate  # noqa: E402
from ringflash.hf_config import read_config, resolved  # noqa: E402
from ringflash.model.weights import check_folder  # noqa: E402
from ringflash.tests.support.hf_cases import config_of, model_of, own_attention  # noqa: E402
from ringflash.train import trainer  # noqa: E402
from ringflash.train.sharded import full_state_dict  # noqa: E402
from ringflash.train.trainer import Trainer, layer_masks  # noqa: E402
from ringflash.train.world import connect, single  # noqa: E402

CPU = torch.device("cpu")
# name: (kind, what its configuration says beyond its sizes, dp, cp, parallel.shard, train.* and parallel.ulysses)
TIED = {"tie_word_embeddings": True}
CASES = {
    "qwen3": ("qwen3", {}, 1, 2, 1, {}),
    "windows, tied": ("gemma3_text", TIED, 1, 2, 1, {"activations": "block"}),
    "heads": ("gpt_oss", {}, 1, 2, 1, {"ulysses": 2}),
    "replicas": ("mistral", {}, 2, 1, 1, {}),
    "sharded": ("qwen3", {}, 1, 2, 2, {"activations": "block"}),
    "sharded, tied": ("gemma3_text", TIED, 1, 2, 2, {}),
}


def run_config(folder, kind: str, changes: dict, *, dp: int = 1, cp: int = 1, shard: int = 1, ulysses: int = 1, weights=None,
               **train):
    """tiny() with a model of transformers instead of ours; two samples a step, whatever dp is."""
    path = folder / f"{kind}-{changes.get('tie_word_embeddings', False)}"
    if not path.exists():
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config_of(kind, vocab_size=257, **changes).to_dict()))
    cfg = tiny(dp=dp, cp=cp, accumulation=2 // dp)
    cfg = dataclasses.replace(cfg, model=ModelConfig(hf=str(path), weights=weights, loss_chunk_rows=7),
                              parallel=dataclasses.replace(cfg.parallel, shard=shard, ulysses=ulysses),
                              optim=dataclasses.replace(cfg.optim, lr=0.1))
    return with_train(resolved(cfg), **train)


def two_steps(cfg, world) -> dict:
    made = Trainer(cfg, world, text(cfg))
    first = copied(made)
    results = [made.train_step(step) for step in range(2)]
    return {"loss": [r.loss for r in results], "norm": [r.grad_norm for r in results], "valid": [r.valid_tokens for r in results],
            "heldout": made.evaluate()[0], "drawn": first, "weights": copied(made)}


def copied(made: Trainer) -> dict | None:
    """All weights, on rank 0."""
    state = full_state_dict(made.model)
    return None if state is None else {name: value.clone() for name, value in state.items()}


def body(rank: int, folder) -> dict:
    found = {}
    for name, (kind, changes, dp, cp, shard, train) in CASES.items():
        cfg = run_config(folder, kind, changes, dp=dp, cp=cp, shard=shard, **train)
        found[name] = two_steps(cfg, connect(dp, cp, CPU, timeout_s=60.0, shard=shard, ulysses=cfg.parallel.ulysses))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hf")
    for kind, changes, *_ in CASES.values():
        run_config(made, kind, changes)  # writes its config.json
    return made


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    return run_ranks(functools.partial(body, folder=folder), 2, tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize("name", CASES)
def test_two_steps_on_two_ranks_are_those_on_one(folder, ranks, name):
    kind, changes, *_ = CASES[name]
    one, two = two_steps(run_config(folder, kind, changes), single(CPU)), ranks[0][name]
    assert one["drawn"].keys() == two["drawn"].keys()
    assert all(torch.equal(one["drawn"][key], two["drawn"][key]) for key in one["drawn"]), "weights were drawn differently"
    assert two["valid"] == one["valid"]
    for key in ("loss", "norm", "heldout"):
        assert two[key] == pytest.approx(one[key], rel=2e-5), key
    for key, value in one["weights"].items():
        moved = float((value - one["drawn"][key]).abs().max())
        assert float((two["weights"][key] - value).abs().max()) <= 1e-4 * moved + 1e-7, key
    assert one["loss"][1] != one["loss"][0]


def test_under_bf16_attention_gets_16_bit_rows_and_the_loss_stays_near(folder, monkeypatch):
    cfg, seen = run_config(folder, "qwen3", {}), []

    def watched(q, k, v, **options):
        seen.append((q.dtype, k.dtype, v.dtype))
        return ring_attention(q, k, v, **options)

    monkeypatch.setattr(trainer, "ring_attention", watched)
    fp32, bf16 = (Trainer(each, single(CPU), text(each)).train_step(0) for each in (cfg, with_train(cfg, dtype="bf16")))
    assert set(seen[:4]) == {(torch.float32,) * 3} and set(seen[-4:]) == {(torch.bfloat16,) * 3}
    assert bf16.loss == pytest.approx(fp32.loss, rel=2e-3) and bf16.grad_norm == pytest.approx(fp32.grad_norm, rel=3e-2)


def test_the_loss_is_transformers_own_over_the_same_documents(folder):
    cfg = run_config(folder, "mistral", {})
    made = Trainer(cfg, single(CPU), text(cfg))
    theirs = AutoModelForCausalLM.from_config(read_config(cfg.model.hf), attn_implementation="eager", dtype=torch.float32)
    theirs.load_state_dict({"lm_head.weight" if key == "head.weight" else key: value
                            for key, value in made.model.state_dict().items()})
    batch = made.data.train.batch(0, 0, 0, num_micro_batches=1, dp_size=1)
    sharded, cu_seqlens = made.shard(batch), [int(x) for x in batch["cu_seqlens"]]
    loss, _ = own_attention(theirs, sharded.tokens, sharded.labels, cu_seqlens, sharded.num_valid)
    assert len(cu_seqlens) > 2 and float(made.loss_sum(sharded).detach()) / sharded.num_valid == pytest.approx(loss, rel=1e-5)


def test_a_folder_of_safetensors_gives_the_first_weights_and_what_differs_is_refused_by_name(folder, tmp_path):
    hf_config = config_of("qwen3", vocab_size=257)
    model_of(hf_config).save_pretrained(tmp_path / "theirs")
    cfg = run_config(folder, "qwen3", {}, weights=str(tmp_path / "theirs"))
    check_folder(cfg)
    found = Trainer(cfg, single(CPU), text(cfg)).model.state_dict()
    expected = model_of(hf_config).state_dict()
    assert all(torch.equal(found["head.weight" if key == "lm_head.weight" else key], value) for key, value in expected.items())
    with pytest.raises(ValueError, match=r"model.weights=.*unknown: .*k_norm"):
        check_folder(run_config(folder, "mistral", {}, weights=str(tmp_path / "theirs")))
    hf_config.rms_norm_eps = 1e-3
    hf_config.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="config.rms_norm_eps=1e-06: they are of a model with 0.001"):
        check_folder(cfg)
    with pytest.raises(ValueError, match="neither weights.pt nor config.json"):
        check_folder(run_config(folder, "qwen3", {}, weights=str(tmp_path)))


@pytest.mark.parametrize("kind, changes", [("qwen3", {}), ("gemma3_text", TIED), ("mixtral", {}), ("qwen3_moe", {})])
def test_a_run_is_exported_to_a_folder_that_transformers_reads_and_training_begins_with(folder, tmp_path, kind, changes):
    from omegaconf import OmegaConf

    from ringflash.launch.convert import main

    cfg = run_config(folder, kind, changes)
    made = Trainer(cfg, single(CPU), text(cfg))
    made.train_step(0)
    written = dataclasses.replace(cfg, model=ModelConfig(hf=cfg.model.hf))  # as a run folder has it
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(written), tmp_path / "run" / ".hydra" / "config.yaml")
    torch.save(made.model.state_dict(), tmp_path / "run" / "weights.pt")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(1, 20)[None]
    hidden = made.model(tokens, torch.arange(19), layout=Layout("zigzag", 19, 1, layer_masks(cfg.attention)))
    expected = (hidden @ made.model.head.weight.T).detach()
    assert float((theirs(input_ids=tokens).logits.detach() - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    for source in ("out", "run"):
        again = run_config(folder, kind, changes, weights=str(tmp_path / source))
        check_folder(again)
        state = Trainer(again, single(CPU), text(again)).model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in made.model.state_dict().items()), source


@pytest.mark.parametrize("change, told", [
    ({"model": {"dim": 64}}, "model.dim=64"), ({"model": {"sinks": True}}, "model.sinks=True"),
    ({"attention": {"window_size": [7, 0]}}, "attention.window_size"),
    ({"train": {"activations": "offload"}}, "valid .*: none, block"),
    ({"train": {"tile_rows": 8}}, "train.tile_rows=8"), ({"attention": {"deterministic": True}}, "attention.deterministic"),
    ({"model": {"hf": "/no/such/folder"}}, "no config.json")])
def test_an_option_that_a_model_of_transformers_has_itself_is_refused(folder, change, told):
    cfg = run_config(folder, "qwen3", {})
    plain = dataclasses.replace(tiny(), model=ModelConfig(hf=cfg.model.hf))
    (group, values), = change.items()
    with pytest.raises(ValueError, match=told):
        resolved(dataclasses.replace(plain, **{group: dataclasses.replace(getattr(plain, group), **values)}))


@pytest.mark.parametrize("kind, changes, told", [
    ("gemma2", {}, "final_logit_softcapping=30.0"), ("granite", {}, "logits_scaling=3.0"),
    ("llama", {"attention_dropout": 0.1}, "config.attention_dropout=0.1")])
def test_what_the_training_loop_cannot_do_for_a_model_is_refused_by_its_option(tmp_path, kind, changes, told):
    with pytest.raises(ValueError, match=told):
        run_config(tmp_path, kind, changes)


def test_sizes_and_windows_are_read_from_config_json_before_a_rank_starts(folder):
    cfg = run_config(folder, "gemma3_text", TIED, cp=4)
    model = cfg.model
    assert (model.vocab_size, model.dim, model.num_layers, model.head_dim, model.tie_embeddings) == (257, 32, 2, 8, True)
    assert layer_masks(cfg.attention) == (Mask(window_size=(5, 0)), Mask())
    with pytest.raises(ValueError, match="data.seq_len=3: each of 4 cp ranks needs a token"):
        validate(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, seq_len=3)), 4)


def test_a_shard_without_rows_is_refused_by_every_rank(folder):
    cfg = run_config(folder, "qwen3", {})
    made = Trainer(cfg, single(CPU), text(cfg)).model
    for rank in range(3):
        sharded = shard_batch({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, Layout("zigzag", 2, 3), rank=rank)
        with pytest.raises(ValueError, match="seq_len=2 over 3 ranks"):
            made(sharded.tokens, sharded.positions, sharded.labels, layout=sharded.layout)
