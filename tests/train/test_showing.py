"""What a run shows: figures against independent counts, event files equal to metrics.jsonl, a trace with the ring's hops; and a
step without a finite loss that is left out on all ranks together."""
import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch
from train_ranks import run_ranks, text, tiny, with_train

from ringflash import Mask
from ringflash.config import ParallelConfig, validate
from ringflash.flops import LayerPairs, peak_tflops, step_flops
from ringflash.model import ModelConfig, Transformer
from ringflash.ring import tracing
from ringflash.train import event_files
from ringflash.train.loop import train
from ringflash.train.mfu import Meter, matmul_parameters, peak_of
from ringflash.train.record import in_short
from ringflash.train.trainer import NonFiniteError, Trainer
from ringflash.train.world import connect, single

ALWAYS = {"loss", "grad_norm", "tokens_per_s", "tokens_per_s_per_rank", "tflops_per_rank", "peak_memory_gib", "data_wait_ms"}


def config(**train):
    cfg = tiny(**{"steps": 4, "eval_sequences": 2, "seq_len": 45} | train)
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, progress=False, save_weights=False),
                               checkpoint=dataclasses.replace(cfg.checkpoint, every=0))


def rows_of(folder, kind):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def sees(mask, query, key, start):
    """By the mask's own description, of one pair in the document that begins at `start`."""
    if key > query:
        return False
    if mask.chunk_size and (query - start) // mask.chunk_size != (key - start) // mask.chunk_size:
        return False
    left = mask.window_size[0]
    return left < 0 or query - key <= left or key - start < mask.first_tokens


@pytest.mark.parametrize("cu_seqlens", (None, [0, 1, 9, 31, 40]))
def test_pairs_are_those_that_the_layers_masks_allow(cu_seqlens):
    masks = (Mask(window_size=(5, 0), first_tokens=2), Mask(), Mask(chunk_size=7))
    bounds = cu_seqlens or [0, 40]
    counts = [sum(sees(mask, q, k, start) for start, stop in zip(bounds, bounds[1:]) for q in range(start, stop)
                  for k in range(start, stop)) for mask in masks]
    # Five layers take the three masks in turn.
    want = 2 * counts[0] + 2 * counts[1] + counts[2]
    assert LayerPairs(masks, 5, 40).of(None if cu_seqlens is None else np.array(cu_seqlens)) == want
    with pytest.raises(ValueError, match="must be causal"):
        LayerPairs((Mask(causal=False),), 1, 40)


def test_flops_are_six_per_weight_and_token_and_twelve_per_head_dim_and_pair():
    assert step_flops(1000, 7, num_heads=3, head_dim=8, layer_pairs=28) == 6 * 1000 * 7 + 12 * 3 * 8 * 28
    # Full causal attention counts half the square: the usual 6 * L * H * Q * T in the limit.
    assert LayerPairs((Mask(),), 2, 1000).of(None) == 2 * 1000 * 1001 // 2


def test_one_batch_over_and_over_is_learnt_and_without_evaluation_sequences_nothing_is_evaluated(tmp_path):
    cfg = config(steps=3, eval_sequences=0, eval_every=1)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, max_samples=1))
    summary = train(cfg, single(), text(cfg), tmp_path)
    losses = [row["loss"] for row in rows_of(tmp_path, "train")]
    assert losses[0] > losses[1] > losses[2] and rows_of(tmp_path, "eval") == [] and summary["heldout_loss"] is None
    passkey = dataclasses.replace(cfg.eval, passkey=dataclasses.replace(cfg.eval.passkey, lengths=[64]))
    with pytest.raises(ValueError, match="train.eval_sequences=0 evaluates nothing"):
        validate(dataclasses.replace(cfg, eval=passkey), 1)
    with pytest.raises(ValueError, match="data.max_samples=0: must be at least 1"):
        validate(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, max_samples=0)), 1)


@pytest.mark.parametrize("tied", (False, True))
def test_weights_of_products_are_all_but_norms_and_the_embedding_table(tied):
    model = Transformer(ModelConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=12,
                                    tie_embeddings=tied, sinks=True, qk_norm=True), None)
    attention, ffn = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8, 3 * 8 * 12
    assert matmul_parameters(model) == 2 * (attention + ffn) + 11 * 8


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0),
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA GeForce RTX 3090", None), ("Tesla V100", None),
])
def test_utilisation_is_of_the_data_sheets_dense_peak_and_no_card_is_guessed(name, peak, monkeypatch):
    assert peak_tflops(name) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found, said = peak_of(torch.bfloat16, torch.device("cuda"))
    assert found == peak and name in said and (f"{peak:,.0f} TFLOP/s" in said if peak else said.startswith("no MFU"))
    found, said = peak_of(torch.float32, torch.device("cuda"))
    assert found is None and "float32" in said


def test_a_meter_counts_the_documents_of_the_steps_own_samples():
    cfg = config(accumulation=2)
    made = Trainer(cfg, single(), text(cfg))
    meter = Meter(made)
    lengths = np.concatenate([np.diff(made.data.train.cu_seqlens(sample)) for sample in (2, 3)])  # of step 1
    pairs = int((lengths * (lengths + 1) // 2).sum())
    assert meter.step_flops(1) == 6 * matmul_parameters(made.model) * 90 + 12 * 4 * 8 * 2 * pairs
    meter.peak = 2.0
    row = meter.row(1, 0.5)
    assert row["tflops_per_rank"] == pytest.approx(meter.step_flops(1) / 0.5 / 1e12) and row["mfu"] == row["tflops_per_rank"] / 2
    plain = dict.fromkeys(("loss", "grad_norm", "tokens_per_s", "tokens_per_s_per_rank", "data_wait_ms"), 1.0)
    assert f"MFU {100 * row['mfu']:.1f}%" in in_short(row | plain)


def test_of_a_mixture_of_experts_no_flops_are_claimed():
    cfg = config()
    made = Trainer(cfg, single(), text(cfg))
    made.parameters.append(torch.nn.Parameter(torch.zeros(4, 2, 2)))
    meter = Meter(made)
    assert meter.row(0, 1.0).keys() == {"peak_memory_gib"} and "mixture of experts" in meter.summary()["mfu_convention"]


def test_a_run_shows_its_figures_in_metrics_summary_and_plots_and_says_why_there_is_no_mfu(tmp_path, capsys):
    cfg = config()
    summary = train(cfg, single(), text(cfg), tmp_path)
    for row in rows_of(tmp_path, "train"):
        assert ALWAYS <= row.keys() and "mfu" not in row
        assert all(math.isfinite(row[key]) and row[key] >= 0 for key in ALWAYS)
    (evaluated,) = rows_of(tmp_path, "eval")
    assert sum(bucket["tokens"] for bucket in evaluated["by_position"]) == evaluated["valid_tokens"]
    assert "no MFU: the peak of a CPU is not known" in capsys.readouterr().out and summary["peak_memory_gib"] > 0
    for name in ("loss", "speed", "loss_by_position"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("trace*")) and not (tmp_path / "tensorboard").exists()


class Writer:
    """Stands in for TensorBoard's, which is an extra."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def close(self):
        pass


def test_the_scalars_of_tensorboard_are_the_numbers_of_metrics_jsonl(tmp_path, monkeypatch):
    writer = Writer()
    monkeypatch.setattr(event_files.EventFiles, "__init__", lambda self, folder, step: setattr(self, "writer", writer))
    cfg = config(tensorboard=True, eval_every=2)
    train(cfg, single(), text(cfg), tmp_path)
    want = {(f"{row['kind']}/{key}", row["step"]): value for kind in ("train", "eval") for row in rows_of(tmp_path, kind)
            for key, value in row.items() if key not in ("kind", "step", "by_position")}
    assert writer.scalars == want and ("eval/heldout_loss", 2) in want and ("train/grad_norm", 4) in want


def test_event_files_hold_them_as_tensorboard_reads_them(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    cfg = config(tensorboard=True)
    train(cfg, single(), text(cfg), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for row in rows_of(tmp_path, "train"):
        for key in ALWAYS:
            values = {event.step: event.value for event in events.Scalars(f"train/{key}")}
            assert values[row["step"]] == np.float32(row[key])


@pytest.mark.parametrize(("change", "message"), [
    ({"profile": -1}, "train.profile=-1: a number of steps, at least 0; nearest: 0"),
    ({"profile": 2, "profile_after": 3}, "that is step 4 to 5 of train.steps=4; nearest: train.profile=2 train.profile_after=2"),
    ({"profile_ranks": [0, 3]}, "train.profile_ranks=[0, 3]: this run has ranks 0 to 0; nearest: [0]"),
    ({"on_nonfinite": "ignore"}, "train.on_nonfinite=ignore: valid: stop, skip"),
    ({"max_skipped": 0}, "train.max_skipped=0: must be at least 1; nearest: 1, or train.on_nonfinite=stop"),
])
def test_options_that_cannot_be_are_refused_before_the_run(change, message):
    with pytest.raises(ValueError) as refused:
        validate(config(**change), 1)
    assert message in str(refused.value)


def test_tensorboard_that_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="train.tensorboard=true: the package tensorboard is not installed here; nearest: false"):
        validate(config(tensorboard=True), 1)


def test_a_ring_makes_no_ranges_unless_a_trace_is_wanted(monkeypatch):
    made = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: made.append(name) or tracing._NOTHING)
    cfg = config()
    trainer = Trainer(cfg, single(), text(cfg))
    trainer.gradients(0)
    assert not made
    with tracing.named_ranges():
        trainer.gradients(0)
    assert made and all(name.startswith("ring ") for name in made)


def poisoned(cfg, world, folder, steps, rank=1):
    """train(), where `rank` alone has a loss that is NaN in the given steps; the weights before and after each step."""
    kept, plain = [], Trainer.loss_sum

    def loss_sum(self, sharded):
        loss = plain(self, sharded)
        return loss * math.nan if self.at in steps and world.rank == rank else loss

    def train_step(self, step, before=Trainer.train_step):
        self.at = step
        kept.append([p.detach().clone() for p in self.parameters])
        return before(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "loss_sum", loss_sum)
        patch.setattr(Trainer, "train_step", train_step)
        error = ""
        try:
            summary = train(cfg, world, text(cfg), folder)
        except NonFiniteError as problem:
            summary, error = None, str(problem)
    changed = [any(not torch.equal(a, b) for a, b in zip(*pair)) for pair in zip(kept, kept[1:])]
    return {"summary": summary, "error": error, "changed": changed, "last": kept[-1]}


def two_ranks(folder, rank):
    world = connect(1, 2, torch.device("cpu"), timeout_s=60.0)
    cfg = config(steps=6, on_nonfinite="skip", max_skipped=2)
    cfg = dataclasses.replace(cfg, parallel=ParallelConfig(dp=1, cp=2))
    traced = with_train(cfg, profile=1, profile_after=1, profile_ranks=[1])
    return {"skip": poisoned(traced, world, folder / "skip", (1, 3, 4)),
            "too many": poisoned(cfg, world, folder / "many", (1, 2, 3)),
            "stop": poisoned(with_train(cfg, on_nonfinite="stop"), world, folder / "stop", (1,))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("skip", "many", "stop"):
        (folder / name).mkdir()
    return folder, run_ranks(functools.partial(two_ranks, folder), 2, folder)


def test_a_step_that_one_rank_finds_nan_is_skipped_by_all_and_told(ranks):
    folder, found = ranks
    for rank in found:
        assert not rank["skip"]["error"] and rank["skip"]["summary"]["steps_skipped"] == 3
        # Steps 2, 4 and 5 changed nothing on either rank.
        assert rank["skip"]["changed"] == [True, False, True, False, False]
    assert all(torch.equal(a, b) for a, b in zip(found[0]["skip"]["last"], found[1]["skip"]["last"]))
    rows = rows_of(folder / "skip", "train")
    assert [row["step"] for row in rows if "skipped" in row] == [2, 4, 5] and len(rows) == 6
    assert all((row["loss"] is None) == ("skipped" in row) for row in rows) and rows[1]["skipped"] == "the loss is nan"
    assert (folder / "skip" / "loss.png").is_file() and math.isfinite(found[0]["skip"]["summary"]["heldout_loss"])


def test_more_skipped_steps_in_a_row_than_allowed_end_the_run_and_stop_ends_it_at_the_first(ranks):
    for rank in ranks[1]:
        assert "The 2 steps before it were skipped too, train.max_skipped=2" in rank["too many"]["error"]
        assert rank["too many"]["changed"] == [True, False, False]
        assert rank["stop"]["error"].startswith("step 2: the loss is nan") and rank["stop"]["changed"] == [True]


def test_a_trace_names_step_hop_and_peer_on_the_ranks_that_were_asked(ranks):
    folder = ranks[0] / "skip"
    (path,) = folder.glob("trace*")
    assert path.name == "trace-steps2-2-rank1.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"optimizer step 2", "ring forward step 0: post kv of 1 to 0, kv of 0 from 0",
            "ring forward step 0: wait kv of 1 to 0, kv of 0 from 0", "ring forward step 1: kernel, block of 0",
            "ring backward step 1: kernel, block of 0"} <= names
