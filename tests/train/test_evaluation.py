"""Evaluation: the loss of each token, whole and by position, the same on every mesh, in no more memory than training."""
import numpy as np
import pytest
import torch
from checkpoint_runs import StopAfter, figures, go, kept, rows, whole
from train_ranks import run_ranks, text, tiny, with_train

from ringflash.kernels.intervals import accumulate_dtype
from ringflash.layout import Layout
from ringflash.loss import chunked_cross_entropy
from ringflash.mask import Mask
from ringflash.planning.live_bytes import LiveBytes
from ringflash.token_loss import token_losses
from ringflash.train.evaluation import bucket_of, evaluate, look_back
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, single

SAMPLES = 3  # no multiple of dp
WORLDS = ((1, 4), (2, 2), (4, 1))  # two ranks: test_passkey.py


def config(dp=1, cp=1):
    return with_train(tiny(dp=dp, cp=cp, seq_len=101), eval_sequences=SAMPLES)


def measured(dp, cp, world):
    made = Trainer(config(dp, cp), world, text(config()))
    calls = []
    made.model.register_forward_pre_hook(lambda *_: calls.append(1))
    return evaluate(made), len(calls)


def body(rank):
    return {world: measured(*world, connect(*world, torch.device("cpu"), timeout_s=60.0)) for world in WORLDS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(body, 4, tmp_path_factory.mktemp("ranks"))


def dense():
    """{bucket: (sum, count)} of the same samples, from whole logits in fp64, token by token."""
    made = Trainer(config(), single(), text(config()))
    found = {}
    for sample in range(SAMPLES):
        batch = made.data.heldout.batch_of((sample,))
        sharded = made.shard(batch)
        with torch.no_grad():
            hidden = made.model(sharded.tokens, sharded.positions, layout=sharded.layout)[0]
            logits = torch.log_softmax(hidden.double() @ made.model.head.weight.double().T, dim=1)
        tokens, starts = batch["tokens"][..., np.arange(101)][0], batch["cu_seqlens"].tolist()
        for start, stop in zip(starts, starts[1:]):
            for at in range(start, stop - 1):
                bucket = len(bin(at - start)) - 2 if at > start else 0
                total, count = found.get(bucket, (0.0, 0))
                found[bucket] = total - float(logits[at, tokens[at + 1]]), count + 1
    return found


def test_the_loss_by_position_is_that_of_each_token_by_itself_and_the_whole_is_their_mean():
    want = dense()
    evaluation, _ = measured(1, 1, single())
    assert [(b.start, b.stop, b.tokens) for b in evaluation.by_position] == [
        (1 << i >> 1, 1 << i, count) for i, (_, count) in sorted(want.items())]
    for bucket, (_, (total, count)) in zip(evaluation.by_position, sorted(want.items())):
        assert bucket.loss == pytest.approx(total / count, rel=2e-6)
    assert evaluation.tokens == sum(count for _, count in want.values()) and len(want) > 4
    assert evaluation.loss == pytest.approx(sum(total for total, _ in want.values()) / evaluation.tokens, rel=2e-6)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_mesh_finds_the_figures_of_one_rank(ranks, world):
    want, _ = measured(1, 1, single())
    everywhere = [rank[world][0] for rank in ranks]
    assert all(got == everywhere[0] for got in everywhere)
    got = everywhere[0]
    assert got.tokens == want.tokens and got.loss == pytest.approx(want.loss, rel=2e-6)
    assert [(b.start, b.stop, b.tokens) for b in got.by_position] == [(b.start, b.stop, b.tokens) for b in want.by_position]
    assert [b.loss for b in got.by_position] == pytest.approx([b.loss for b in want.by_position], rel=5e-6)


def test_every_rank_makes_the_same_number_of_forwards_also_where_replicas_run_out_of_samples(ranks):
    # With sharded weights each of them is a collective.
    for world in WORLDS:
        assert {rank[world][1] for rank in ranks} == {-(-SAMPLES // world[0])}


@pytest.mark.parametrize("seq_len", (128, 512))
def test_evaluation_holds_fewer_bytes_at_its_peak_than_a_training_step_and_one_chunk_of_logits(seq_len):
    cfg = with_train(tiny(seq_len=seq_len), eval_sequences=2)
    cfg.model.vocab_size, cfg.model.loss_chunk_rows, cfg.attention.kernel = 600, 32, "cpu"
    made = Trainer(cfg, single(), text(cfg))
    peaks = []
    for work in (lambda: made.gradients(0), lambda: evaluate(made), lambda: evaluate(made)):
        made.optimizer.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            work()
        peaks.append(live.peak)
    chunk = 32 * 600 * 4
    # Three of the size of a chunk: the logits, and what logsumexp makes of them. Then the rows of a few layers' widths.
    assert max(peaks[1:]) < peaks[0] and max(peaks[1:]) < 4 * chunk + seq_len * 4 * 12 * 40
    assert seq_len < 512 or max(peaks[1:]) < seq_len * 600 * 4


def test_buckets_go_from_powers_of_two_to_powers_of_two():
    assert bucket_of(np.array([0, 1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20])).tolist() == [0, 1, 2, 2, 3, 3, 4, 20, 21]


def test_a_row_looks_back_on_its_own_document_wherever_its_rank_has_it():
    cu_seqlens = [0, 3, 3, 8, 10]
    by_rows = np.full(10, -1)
    layout = Layout("zigzag", 10, 2, (Mask(cu_seqlens=cu_seqlens),))
    for rank in range(2):
        by_rows[layout.positions(rank)] = look_back(layout, rank)
    assert by_rows.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    plain = Layout("zigzag", 10, 2, (Mask(),))
    assert look_back(plain, 1).tolist() == plain.positions(1).tolist()


@pytest.mark.parametrize("chunk_rows", (1, 5, 64))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_the_losses_of_rows_add_up_to_the_loss_of_training_and_name_the_first_choice(chunk_rows, dtype):
    rng = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in ((2, 11, 6), (17, 6)))
    labels = torch.randint(0, 17, (2, 11), generator=rng)
    labels[0, 4:9] = labels[1, 0] = -100
    hidden[0, 5] = float("nan")  # of a row without a label
    scores = token_losses(hidden, weight, labels, chunk_rows=chunk_rows)
    logits = hidden.double() @ weight.double().T
    want = torch.where(labels == -100, 0.0, -torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0])
    torch.testing.assert_close(scores.loss.double(), want, rtol=1e-5, atol=1e-6)
    assert scores.is_first.tolist() == ((logits.argmax(-1) == labels) & (labels != -100)).tolist()
    assert scores.loss.dtype == accumulate_dtype(dtype) and not scores.loss.requires_grad
    total, count = chunked_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows)
    assert float(scores.loss.double().sum()) == pytest.approx(float(total), rel=1e-6) and int(count) == 16


def test_rows_without_labels_and_no_rows_have_no_losses():
    for rows in (0, 3):
        scores = token_losses(torch.full((1, rows, 4), float("nan")), torch.ones(5, 4), torch.full((1, rows), -100))
        assert scores.loss.tolist() == [[0.0] * rows] and scores.is_first.tolist() == [[False] * rows]


def test_of_equal_logits_only_the_lowest_id_is_the_first_choice():
    scores = token_losses(torch.zeros(1, 3, 4), torch.ones(5, 4), torch.tensor([[0, 1, 4]]))
    assert scores.is_first.tolist() == [[True, False, False]]


def test_an_evaluation_that_a_stop_came_before_is_made_up_for_after_the_resume_once(tmp_path):
    cfg = kept(every=2)
    go(cfg, single(), tmp_path / "plain")
    # Told to stop after step 4, where an evaluation is due.
    assert go(cfg, single(), tmp_path / "stopped", stop=StopAfter(4))[0] is None
    assert [row["step"] for row in rows(tmp_path / "stopped", "eval")] == [2]
    go(cfg, single(), tmp_path / "stopped")
    assert figures(tmp_path / "stopped") == figures(tmp_path / "plain")


@pytest.mark.parametrize("samples", [1, 3])
def test_a_stop_in_the_middle_of_an_evaluation_is_taken_at_once_and_the_evaluation_made_up_for(tmp_path, samples):
    cfg = kept(every=1000)
    go(cfg, single(), tmp_path / "plain")
    # Two samples after every second step: told within the evaluation after step 2, or after 4.
    step = 2 * (samples + 1) // 2
    assert go(cfg, single(), tmp_path / "stopped", stop=StopAfter(samples=samples))[0] is None
    assert whole(tmp_path / "stopped") == [f"step-{step:08d}"]
    assert [row["step"] for row in rows(tmp_path / "stopped", "eval")] == list(range(2, step, 2))
    # Once more within the one that is made up for: the same checkpoint is still the one to go on from.
    assert go(cfg, single(), tmp_path / "stopped", stop=StopAfter(samples=1))[0] is None
    assert whole(tmp_path / "stopped") == [f"step-{step:08d}"]
    go(cfg, single(), tmp_path / "stopped")
    assert figures(tmp_path / "stopped") == figures(tmp_path / "plain")
