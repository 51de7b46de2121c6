"""Predicted seconds follow from the plans' pairs and bytes and from the rates, and from nothing else."""
import dataclasses

import numpy as np
import pytest

from ringflash import Layout, Mask
from ringflash.config import Config
from ringflash.planning.hardware import GPUS, hardware_of, interpolate
from ringflash.planning.job import Job, check_counts, divisions
from ringflash.planning.ring_steps import PASSES, _closed, _loads, pass_time, ring_loads
from ringflash.planning.search import longest_sequence, predict, ranked
from ringflash.planning.step_time import step_time
from ringflash.ring.cost import Machine, estimate
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import Heads, choose

HEADS = Heads(1, 32, 8, 128, itemsize=2)
H200 = GPUS["h200"]


def llama_8b(seq_len=1 << 20, **train) -> Config:
    cfg = Config()
    for key, value in dict(vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336).items():
        setattr(cfg.model, key, value)
    cfg.train.tile_rows, cfg.train.residual_dtype, cfg.data.seq_len = 4096, "bf16", seq_len
    for key, value in train.items():
        setattr(cfg.train, key, value)
    return cfg


def job(gpus=8, policy="block_save_attention", ring=None, cfg=None, shard=None, dp=1, per_host=8, ulysses=1) -> Job:
    ring = gpus // dp // ulysses if ring is None else ring
    return Job(cfg or llama_8b(), (Mask(),), gpus, per_host, dp, ring, ulysses, gpus if shard is None else shard, policy)


@pytest.mark.parametrize("heads", [HEADS, Heads(1, 16, 16, 128, itemsize=2)], ids=["kv rotates", "q rotates"])
@pytest.mark.parametrize("ring, ranks_per_host", [(8, 8), (16, 4)])
def test_the_closed_form_of_a_causal_zigzag_ring_takes_as_long_step_by_step_as_its_plan(heads, ring, ranks_per_host):
    seq_len = 1024 * ring
    plan = build_plan(Mask(), Layout("zigzag", seq_len, ring))
    planned = {"forward": _loads(plan, "forward", 1, ranks_per_host),
               "backward": _loads(choose(plan, heads).plan, "backward", 1, ranks_per_host)}
    closed = _closed(seq_len, ring, heads, 1, ranks_per_host, "auto")
    for pass_ in PASSES:
        times = [pass_time(loads[pass_], pass_, heads, H200, degree=1, seq_rows=1024, whole=heads, ranks_per_host=ranks_per_host)
                 for loads in (planned, closed)]
        assert planned[pass_].rotates == closed[pass_].rotates
        assert len(times[0].steps) == len(times[1].steps)
        for one, other in zip(times[0].steps, times[1].steps):
            assert one.kernel_ms == pytest.approx(other.kernel_ms, rel=2e-3)
            # Between hosts it lets each hop wait for a whole shard, of which the ranks at their edges may send half.
            assert one.hop_ms == pytest.approx(other.hop_ms, rel=0.01) or (ranks_per_host < ring and one.hop_ms < other.hop_ms)
        assert times[0].hops_ms <= times[1].hops_ms * 1.01 and times[1].hops_ms < 1.4 * times[0].hops_ms
        own, other = (loads[pass_].buffers for loads in (planned, closed))
        for rows, found in ((own.own, other.own), (own.received, other.received)):
            assert sum(rows.values()) <= sum(found.values()) * 1.001 and sum(rows.values()) >= 0.5 * sum(found.values())


@pytest.mark.parametrize("layout, mask", [("zigzag", Mask()), ("contiguous", Mask(window_size=(511, 0))),
                                          ("balanced", Mask(cu_seqlens=(0, 3000, 3100, 9000, 16384)))])
def test_with_the_same_rates_a_layer_takes_what_the_cost_model_of_the_ring_says(layout, mask):
    made = Layout(layout, 16384, 4, mask, 2)  # of the dense mask, a scaled plan
    rates = Machine(ranks_per_host=4)
    flat = {"forward_tflops": rates.forward_tflops, "backward_tflops": rates.backward_tflops, "inside_gb_s": rates.inside_gb_s,
            "collective_gb_s": rates.alltoall_gb_s, "across_gb_s": rates.across_gb_s, "exchange_us": rates.exchange_us,
            "visit_us": rates.visit_us}
    hardware = dataclasses.replace(H200.given(flat, "test"), forward_tflops=((1, rates.forward_tflops),),
                                   backward_tflops=((1, rates.backward_tflops),))
    expected = estimate(build_plan(mask, made), made, HEADS, rates)
    local = Heads(1, 16, 4, 128, itemsize=2)
    loads = ring_loads(mask, (mask,), layout, 16384, 4, local, degree=2, ranks_per_host=4)
    for pass_, of_cost in (("forward", expected.forward), ("backward", expected.backward)):
        found = pass_time(loads[pass_], pass_, local, hardware, degree=2, seq_rows=made.shard_len(0), whole=HEADS,
                          ranks_per_host=4)
        assert found.kernels_ms == pytest.approx(of_cost.kernels_ms, rel=5e-3)
        assert found.exposed_ms == pytest.approx(of_cost.exposed_ms, rel=5e-3, abs=1e-3)
        assert found.alltoall_ms == pytest.approx(of_cost.alltoall_ms, rel=1e-6)


def test_the_published_step_of_380_s_is_337_model_tflops_per_gpu_by_this_convention():
    cfg = llama_8b()
    for key, value in dict(vocab_size=151936, num_layers=36, ffn_dim=12288, head_dim=128).items():  # Qwen3 8B
        setattr(cfg.model, key, value)
    found = step_time(job(cfg=cfg), H200)
    assert found.model_flops / 380 / 8 / 1e12 == pytest.approx(337, rel=0.01)


def test_saving_attention_spares_one_forward_of_it_and_nothing_else():
    saved, again = (step_time(job(policy=policy), H200).parts for policy in ("block_save_attention", "block"))
    assert saved["attention, recomputed"] == 0
    assert again["attention, recomputed"] == pytest.approx(again["attention, forward"])
    assert {k: v for k, v in saved.items() if k != "attention, recomputed"} == pytest.approx(
        {k: v for k, v in again.items() if k != "attention, recomputed"}, rel=1e-9)


@pytest.mark.parametrize("policy", ["none", "block"])
def test_a_tile_that_holds_all_rows_is_computed_again_in_the_backward_as_several_are(policy):
    again = [step_time(job(1, policy, cfg=llama_8b(8192, tile_rows=tile)), H200).parts["matmul and rows, recomputed"]
             for tile in (0, 4096, 8192, 16384)]
    assert again[1] == again[2] == again[3] > 1.05 * again[0]


def test_a_slow_network_shows_and_a_fast_one_hides_behind_kernels():
    def exposed(rate):
        hardware = H200.given({"across_gb_s": rate}, "test")
        return step_time(job(64, cfg=llama_8b(1 << 18)), hardware).parts["ring, not hidden"]

    assert exposed(1000.0) < 0.05 * exposed(3.0) and exposed(3.0) > 1.0


def test_twice_the_gpus_halve_a_long_step_and_thousands_are_planned():
    eight, many = (predict(job(gpus), H200) for gpus in (8, 16))
    assert many.time.seconds == pytest.approx(eight.time.seconds / 2, rel=0.02)
    found, refused = ranked(divisions(llama_8b(), (Mask(),), 2048, 8, shard=64, ulysses=1), H200)
    assert found[0].fits and len(found) > 20 and not refused
    assert found[0].time.tokens_per_s_per_gpu <= eight.time.tokens_per_s_per_gpu * 1.01


def test_the_best_division_fits_and_none_that_fits_is_clearly_faster():
    found, _ = ranked(divisions(llama_8b(), (Mask(),), 8, 8, shard=8), H200)
    fitting = [each for each in found if each.fits]
    assert found[0].fits and not found[-1].fits and found[-1].why_not
    assert found[0].time.tokens_per_s_per_gpu >= 0.99 * max(each.time.tokens_per_s_per_gpu for each in fitting)


def test_the_longest_sequence_fits_and_one_percent_more_does_not():
    given = job(policy="offload")
    longest = longest_sequence(given, H200)
    assert predict(given.with_seq_len(longest), H200).fits
    assert not predict(given.with_seq_len(int(longest * 1.02)), H200).fits


def test_packed_documents_need_a_fraction_of_the_time_and_a_mask_per_kind_of_layer_counts_its_own_layers():
    cfg = llama_8b(1 << 17)
    cfg.attention.layout = "balanced"
    documents = tuple(range(0, (1 << 17) + 1, 8192))
    whole, packed = (step_time(dataclasses.replace(job(cfg=cfg), documents=cut), H200) for cut in (None, documents))
    assert packed.model_flops - packed.matmul_flops == pytest.approx((whole.model_flops - whole.matmul_flops) / 16, rel=1e-3)
    cfg = llama_8b(1 << 17)
    both = dataclasses.replace(job(cfg=cfg), kinds=(Mask(window_size=(1023, 0)), Mask()))
    assert [(count, mask.window_size) for mask, count in both.layers_by_mask] == [(16, (1023, 0)), (16, (-1, -1))]


def test_rates_between_measured_lengths_lie_between_them_and_beyond_the_last_are_its_own():
    curve = ((1024, 100.0), (4096, 400.0))
    found = [interpolate(curve, rows) for rows in (512, 1024, 2048, 4096, 1 << 20)]
    assert found[0] == 50.0 and found[1] == 100.0 and 100 < found[2] < 400 and found[3:] == [400.0, 400.0]
    assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize("call, named", [
    (lambda: hardware_of("h300"), "--gpu h300: unknown kind; valid: h200"),
    (lambda: check_counts(12, 8), "--gpus 12: .* nearest: 8 or 16"),
    (lambda: check_counts(0, 8), "--gpus 0: must be at least 1"),
    (lambda: divisions(llama_8b(), (Mask(),), 8, 8, cp=3), "parallel.cp=3: must divide the 8 GPUs; nearest: 2 or 4"),
    (lambda: divisions(llama_8b(), (Mask(),), 8, 8, dp=2, cp=2), "must be the 8 GPUs; nearest: parallel.dp=2 parallel.cp=4"),
    (lambda: divisions(llama_8b(), (Mask(),), 8, 8, ulysses=3), "parallel.ulysses=3: .* nearest: 2 or 4"),
    (lambda: divisions(llama_8b(), (Mask(),), 8, 8, shard=5), "parallel.shard=5: must divide the 8 GPUs; nearest: 4 or 8"),
    (lambda: ring_loads(Mask(causal=False), (Mask(causal=False),), "zigzag", 1 << 17, 128, HEADS), "a ring of 128: .*64"),
    (lambda: H200.given({"speed": 1.0}, "--rate"), "--rate: speed: no such rate; valid: across_gb_s"),
    (lambda: H200.given({"matmul_tflops": -1.0}, "--rate"), "--rate: matmul_tflops=-1.0: must be a finite number above 0"),
])
def test_what_cannot_be_is_refused_by_name_with_the_nearest_that_can(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_every_number_of_every_gpu_has_a_source():
    for hardware in GPUS.values():
        for each in dataclasses.fields(hardware):
            if each.name not in ("name", "sources", "kernel"):
                assert hardware.source(each.name), f"{hardware.name}: {each.name}"
