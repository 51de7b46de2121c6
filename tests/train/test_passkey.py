"""The passkey task: what its samples hold, what training has of them, and that found keys are counted alike on every mesh."""
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from train_ranks import run_ranks, tiny, with_train

from ringflash.config import EvalConfig, validate
from ringflash.data.passkey import PackedPasskeys, PasskeyDataset, RandomFiller, TextFiller
from ringflash.eval_options import PasskeyConfig
from ringflash.launch import evaluate as launch_evaluate
from ringflash.token_loss import TokenLoss
from ringflash.train.evaluation import evaluate
from ringflash.train.loop import train
from ringflash.train.passkey import recall
from ringflash.train.text import open_data
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, single

PROMPT, LETTERS = np.array([7, 8]), np.arange(40, 60)


def dataset(seq_len=64, *, filler=None, **options):
    filler = RandomFiller(np.arange(9, 40), 5) if filler is None else filler
    return PasskeyDataset(filler, seq_len, **{"prompt": PROMPT, "alphabet": LETTERS, "key_tokens": 4, "seed": 5} | options)


def test_a_sample_says_its_key_at_its_depth_and_again_at_its_end():
    made = dataset(depths=(0.0, 0.25, 1.0))
    for sample, place in ((0, 0), (1, 13), (2, 52), (3, 0), (4, 13)):
        tokens, key = made.read(sample, np.arange(64)), made.key(sample)
        assert tokens[place:place + 6].tolist() == tokens[58:].tolist() == [*PROMPT, *key]
        rest = np.delete(tokens, [*range(place, place + 6), *range(58, 64)])
        assert len(rest) == 52 and not np.isin(rest, [*PROMPT, *LETTERS]).any() and np.isin(key, LETTERS).all()
        assert made.answers(sample, np.arange(64)).tolist() == [-100] * 60 + key.tolist()


def test_rows_are_the_same_however_they_are_asked_for_and_others_in_every_sample():
    text = np.arange(1000) % 31 + 9
    for made in (dataset(), dataset(filler=TextFiller([text, text[:50]], ["a", "b"], 5)), packed()):
        size = made.seq_len
        whole = made.read(3, np.arange(size))
        for rows in (np.arange(size)[::-1], np.array([63, 0, 63, 5]), np.array([], np.int64)):
            assert made.read(3, rows).tolist() == whole[rows].tolist()
            assert made.answers(3, rows).tolist() == made.answers(3, np.arange(size))[rows].tolist()
        assert made.read(4, np.arange(size)).tolist() != whole.tolist()
        with pytest.raises(IndexError, match="positions must lie in"):
            made.read(3, np.array([size]))


def test_text_runs_on_around_the_key_and_begins_anew_where_it_ends():
    made = dataset(filler=TextFiller([np.arange(9, 40)], ["a"], 5), depths=(0.5,))
    tokens = made.read(0, np.arange(64))
    rest = np.delete(tokens, [*range(26, 32), *range(58, 64)])
    assert (np.diff(rest) % 31 == 1).all()


def test_keys_are_drawn_evenly_and_places_everywhere():
    made = dataset(seq_len=20)
    letters = np.concatenate([made.key(sample) for sample in range(500)])
    assert set(letters) == set(LETTERS) and np.bincount(letters - 40).min() > 50
    assert all(len(set(made.key(sample))) == 4 for sample in range(100))
    assert {made.place(sample) for sample in range(200)} == set(range(9))


def packed(seq_len=150, lengths=(16, 32, 64), **options):
    task = {"prompt": PROMPT, "alphabet": LETTERS, "key_tokens": 4, "seed": 5} | options
    return PackedPasskeys(RandomFiller(np.arange(9, 40), 5), seq_len, lengths, **task)


def test_a_packed_sample_is_full_of_texts_of_its_lengths_each_with_its_own_key():
    made = packed()
    tokens_of = dict.fromkeys((16, 32, 64), 0)
    for sample in range(300):
        boundaries = made.cu_seqlens(sample)
        assert boundaries[0] == 0 and boundaries[-1] == 150 and made.document_mask
        tokens, answers = made.read(sample, np.arange(150)), made.answers(sample, np.arange(150))
        keys = []
        for start, stop in zip(boundaries.tolist(), boundaries.tolist()[1:]):
            if stop - start not in tokens_of:
                assert stop == 150 and stop - start < 16 and (answers[start:] == -100).all()
                continue
            tokens_of[stop - start] += stop - start
            keys.append(tuple(tokens[stop - 4:stop]))
            assert tokens[stop - 6:stop - 4].tolist() == PROMPT.tolist()
            assert answers[start:stop].tolist() == [-100] * (stop - start - 4) + list(keys[-1])
        assert len(set(keys)) == len(keys)
    # Even shares of the tokens; the shortest fill up what the others leave.
    shares = {length: tokens / 300 / 150 for length, tokens in tokens_of.items()}
    assert shares[64] == pytest.approx(1 / 3, abs=0.05) and 0.2 < shares[32] < 0.4 and 0.2 < shares[16] < 0.4


def test_the_places_and_the_order_of_packed_texts_are_drawn():
    made, places, firsts = packed(lengths=(16, 32)), set(), set()
    for sample in range(200):
        boundaries = made.cu_seqlens(sample)
        tokens = made.read(sample, np.arange(150))
        firsts.add(int(boundaries[1]))
        places |= {int(np.flatnonzero(tokens[start:stop] == PROMPT[0])[0]) for start, stop in zip(boundaries, boundaries[1:])
                   if stop - start == 32}
    assert firsts == {16, 32} and places == set(range(32 - 2 * 6 + 1))


def test_labels_are_at_the_answers_alone_or_everywhere():
    for made in (dataset(), packed()):
        labels = made.batch_of((2,))["labels"]
        rows = np.arange(made.seq_len)
        assert labels[..., rows][0].tolist() == made.answers(2, rows).tolist() and labels.shape == (1, made.seq_len)
    assert "labels" not in dataset(everywhere=True).batch_of((2,))
    hashes = {made.batch_hash((n,)) for made in (dataset(), dataset(seed=6), packed(), dataset(everywhere=True)) for n in (0, 1)}
    assert len(hashes) == 8


def config(**passkey):
    options = {"filler": "random", "key_tokens": 2, "prompt": "#", "alphabet": "xyz"} | passkey
    cfg = tiny(seq_len=65, eval_sequences=3, steps=6)
    return dataclasses.replace(
        cfg, eval=EvalConfig(PasskeyConfig(**options)), data=dataclasses.replace(cfg.data, task="passkey"),
        optim=dataclasses.replace(cfg.optim, lr=0.3), run=dataclasses.replace(cfg.run, progress=False))


@pytest.mark.parametrize(("change", "message"), [
    ({"prompt": ""}, "eval.passkey.prompt=''"), ({"alphabet": "aa"}, "eval.passkey.alphabet='aa'"),
    ({"depths": 0}, "eval.passkey.depths=0: must be at least 1; nearest: 1"), ({"lengths": [1]}, "eval.passkey.lengths=[1]"),
    ({"filler": "noise"}, "eval.passkey.filler=noise: valid: text, random"), ({"labels": "some"}, "valid: answer, all"),
    ({"packed": [66]}, "eval.passkey.packed=[66]: must fit into data.seq_len=65; nearest: [65]"),
    ({"lengths": [5]}, "eval.passkey.lengths=5: 5 tokens do not hold a key of 2 with its prompt of 1 twice; nearest: 6"),
    ({"key_tokens": 4}, "eval.passkey.key_tokens=4: a key's tokens are all different, and eval.passkey.alphabet has 3; near"),
    ({"prompt": "#" * 40}, "data.seq_len=65: 65 tokens do not hold a key of 2 with its prompt of 40 twice; nearest: 84"),
    ({"packed": [5]}, "eval.passkey.packed=[5]: 5 tokens do not hold"),
    ({"alphabet": "x\u00e9"}, "eval.passkey.alphabet='x\u00e9': each character is to be one token, which '\u00e9' is not"),
])
def test_a_task_that_cannot_be_is_refused_by_name_before_any_rank_starts(change, message):
    with pytest.raises(ValueError) as refused:
        cfg = config(**change)
        validate(cfg, 1)
        open_data(cfg)
    assert message in str(refused.value)


def test_packed_texts_want_document_masks_and_the_prompts_tokens_a_vocabulary_that_has_them():
    cfg = config(packed=[16])
    cfg.data.document_mask = False
    with pytest.raises(ValueError, match=r"eval.passkey.packed=\[16\]: packed texts are documents"):
        validate(cfg, 1)
    cfg = config()
    cfg.model.vocab_size = 122
    with pytest.raises(ValueError, match="model.vocab_size=122: the tokens of eval.passkey's prompt and alphabet need 123; near"):
        open_data(cfg)


def test_training_evaluation_and_held_out_texts_ask_for_other_keys():
    data = open_data(config(lengths=[65], alphabet="abcdefghij", key_tokens=9))
    keys = [tuple(made.key(n)) for made in (data.train, data.heldout, *data.passkey) for n in range(20)]
    assert len(set(keys)) == 60 and data.unigram_nats == pytest.approx(np.log(10))


class Finder:
    """A model that knows the answers of some samples: `wrong` says how many tokens of a sample's key it gets wrong."""

    def __init__(self, wrong):
        self.wrong, self.sample = wrong, -1

    def eval(self):
        pass

    def modules(self):
        return []

    def __call__(self, tokens, positions, labels, *, layout, reduction):
        self.sample += 1
        is_first = labels != -100
        is_first[:, is_first[0].nonzero()[:self.wrong(self.sample), 0]] = False
        return TokenLoss(torch.zeros(labels.shape), is_first)


def test_a_key_is_found_if_all_of_its_tokens_are_at_its_own_length_and_depth():
    cfg = config(lengths=[16, 40], depths=3, samples=4)
    data = open_data(cfg)
    # Of the first length: depth 1 always, depth 0 never a whole key, depth 0.5 in one of four. Of the second: all.
    wrong = Finder(lambda n: 0 if n >= 12 else {0: 1, 1: 0 if n == 4 else 2, 2: 0}[n % 3])
    trainer = SimpleNamespace(cfg=cfg, world=single(), data=data, model=wrong, dtype=torch.float32, asked_to_stop=lambda: False,
                              shard=lambda batch: Trainer.shard(SimpleNamespace(cfg=cfg, world=single()), batch))
    found = recall(trainer)
    assert (found.lengths, found.depths, found.samples) == ([16, 40], [0.0, 0.5, 1.0], 4)
    assert found.keys == [[0.0, 0.25, 1.0], [1.0, 1.0, 1.0]] and found.tokens == [[0.5, 0.25, 1.0], [1.0] * 3]
    assert found.mean() == pytest.approx((0.25 + 1 + 3) / 6) and "25" in found.table()


LENGTHS = [17, 33]


def learnt(dp, cp, world):
    """A model that has learnt to guess among the three letters of the keys."""
    cfg = config(lengths=LENGTHS, depths=3, samples=5, packed=[16, 33])
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, dp=dp, cp=cp),
                              train=dataclasses.replace(cfg.train, accumulation=2 // dp))
    made = Trainer(cfg, world, open_data(cfg))
    losses = [made.train_step(step).loss for step in range(6)]
    rows = []
    made.model.head.register_forward_pre_hook(lambda module, args: rows.append(int((args[1] != -100).sum())))
    return {"losses": losses, "recall": recall(made), "evaluation": evaluate(made), "rows": rows}


def two_ranks(rank):
    return {world: learnt(*world, connect(*world, torch.device("cpu"), timeout_s=60.0)) for world in ((1, 2), (2, 1))}


def test_two_ranks_learn_the_task_and_find_the_keys_that_one_rank_finds(tmp_path):
    want = learnt(1, 1, single())
    assert want["losses"][-1] < 1.5 < 5 < want["losses"][0] and 0.2 < np.mean(want["recall"].tokens) < 0.8
    for rank in run_ranks(two_ranks, 2, tmp_path):
        for got in rank.values():
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-5) and got["recall"] == want["recall"]
            assert got["evaluation"].tokens == want["evaluation"].tokens
            assert got["evaluation"].loss == pytest.approx(want["evaluation"].loss, rel=1e-5)
    # Logits of a text are made at the rows before its answer, and nowhere else.
    assert want["rows"][:30] == [2] * 30


def test_a_run_shows_what_it_found_and_a_finished_one_is_asked_again_on_its_own(tmp_path, capsys):
    cfg = with_train(config(lengths=LENGTHS, depths=2, samples=2), steps=2, eval_every=1)
    summary = train(cfg, single(), open_data(cfg), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["kind"] == "passkey"]
    assert [row["step"] for row in found] == [1, 2] and found[-1]["lengths"] == LENGTHS and len(found[-1]["keys"]) == 2
    assert summary["passkey_found"] == found[-1]["found"] == np.mean(found[-1]["keys"])
    assert (tmp_path / "passkey.png").read_bytes()[:4] == b"\x89PNG"

    from omegaconf import OmegaConf
    (tmp_path / ".hydra").mkdir()
    cfg.run.device = "cpu"
    OmegaConf.save(OmegaConf.structured(cfg), tmp_path / ".hydra" / "config.yaml")
    assert launch_evaluate.main([f"run={tmp_path}", f"out={tmp_path / 'passkey.png' / 'in a file'}", "parallel.nproc=1"]) == 2
    assert "in a file: the results cannot be written there" in capsys.readouterr().err
    assert launch_evaluate.main([f"run={tmp_path}", f"out={tmp_path / 'again'}", "parallel.nproc=1"]) == 0
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again["passkey"] == {key: found[-1][key] for key in ("lengths", "depths", "keys", "tokens", "samples")}
    evaluated = [row for row in rows if row["kind"] == "eval"][-1]
    assert again["heldout_loss"] == evaluated["heldout_loss"] and again["by_position"] == evaluated["by_position"]
    shown = capsys.readouterr().out
    assert "held-out loss" in shown and "passkey: keys found" in shown
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"evaluation.json", "loss_by_position.png", "passkey.png"}


@pytest.mark.parametrize(("words", "message"), [
    (["eval.passkey.lengths=[64]"], "run=FOLDER is missing"), (["run=nowhere"], "run=nowhere: no finished run"),
    (["run=nowhere", "-m"], "-m: want run=FOLDER"),
])
def test_a_run_that_cannot_be_evaluated_is_refused_in_a_line(words, message, capsys):
    assert launch_evaluate.main(words) == 2
    assert message in capsys.readouterr().err


