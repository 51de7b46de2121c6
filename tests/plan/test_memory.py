"""Predicted memory is that of the tensors which the model's, the ring's and the optimizer's own code keep alive in a step."""
import pytest

from ringflash import Mask
from ringflash.config import Config
from ringflash.model.activation_memory import LayerSizes, host_bytes_per_token, saved_bytes_per_token
from ringflash.planning.hardware import GPUS, GIB
from ringflash.planning.job import POLICIES, Job, sizes_of
from ringflash.planning.memory import step_memory
from ringflash.tests.support.live_step import peaks_of_step

ALLOWED = 0.05


def config(policy="block", tile_rows=256, residual="bf16", rows=1024, ring=1, **model) -> Config:
    cfg = Config()
    sizes = dict(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=448, vocab_size=512,
                 loss_chunk_rows=128)
    for key, value in {**sizes, **model}.items():
        setattr(cfg.model, key, value)
    cfg.train.activations, cfg.train.tile_rows, cfg.train.residual_dtype = policy, tile_rows, residual
    cfg.data.seq_len, cfg.attention.exchange = rows * ring, "nccl"
    return cfg


def predicted(cfg: Config, ring: int = 1):
    """Of one rank, whose gradients nobody adds to others, as in peaks_of_step."""
    return step_memory(Job(cfg, (Mask(),), 1, 8, 1, ring, 1, 1, cfg.train.activations), GPUS["h200"])


def peaks(cfg: Config, ring: int) -> tuple[float, float]:
    """The largest of the moments before the optimizer, and the optimizer's."""
    moments = {name: sum(parts.values()) for name, parts in predicted(cfg, ring).moments.items()}
    optimizer = moments.pop("optimizer")
    return max(moments.values()), optimizer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ring, tile_rows, residual", [(1, 256, "bf16"), (1, 0, "fp32"), (4, 256, "fp32"), (8, 0, "bf16"),
                                                       (1, 1024, "bf16"), (4, 4096, "fp32")])  # these two: one tile of all rows
def test_the_predicted_peak_is_that_of_the_live_tensors_for_every_policy_with_tiles_and_without_alone_and_in_a_ring(
        policy, ring, tile_rows, residual):
    cfg = config(policy, tile_rows, residual, ring=ring)
    measured = peaks_of_step(cfg, ring)
    step, optimizer = peaks(cfg, ring)
    assert step == pytest.approx(max(measured["forward"], measured["backward"]), rel=ALLOWED)
    assert optimizer == pytest.approx(measured["optimizer"], rel=ALLOWED)


@pytest.mark.parametrize("sizes", [dict(num_layers=6), dict(dim=512, ffn_dim=1536, num_heads=16, num_kv_heads=4, rows=512),
                                   dict(num_heads=8, num_kv_heads=8), dict(ffn_dim=1792, tile_rows=128), dict(vocab_size=4096)],
                         ids=lambda sizes: ",".join(f"{k}={v}" for k, v in sizes.items()))
def test_the_predicted_peak_is_that_of_the_live_tensors_for_other_shapes_and_lengths(sizes):
    ring = 4
    cfg = config("block_save_attention", ring=ring, **sizes)
    measured = peaks_of_step(cfg, ring)
    assert peaks(cfg, ring)[0] == pytest.approx(max(measured["forward"], measured["backward"]), rel=ALLOWED)


@pytest.mark.parametrize("ring, ulysses", [(2, 2), (1, 4), (4, 2)])
def test_the_predicted_peak_counts_what_ulysses_gathers_and_its_parcels(ring, ulysses):
    cfg = config("block_save_attention", ring=ring * ulysses)
    measured = peaks_of_step(cfg, ring, ulysses_size=ulysses)
    found = step_memory(Job(cfg, (Mask(),), 1, 8, 1, ring, ulysses, 1, "block_save_attention"), GPUS["h200"])
    assert sum(found.parts.values()) == pytest.approx(max(measured["forward"], measured["backward"]), rel=ALLOWED)


def test_a_step_of_more_rows_needs_as_much_more_as_was_predicted():
    few, many = (config("block_save_attention", tile_rows=512, num_layers=1, rows=rows) for rows in (4096, 8192))
    measured = [peaks_of_step(cfg)["backward"] for cfg in (few, many)]
    foreseen = [peaks(cfg, 1)[0] for cfg in (few, many)]
    assert foreseen[1] - foreseen[0] == pytest.approx(measured[1] - measured[0], rel=ALLOWED)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tile_rows", [0, 256, 1024, 4096])
def test_what_a_layer_saves_is_what_the_model_says_itself(policy, tile_rows):
    cfg = config(policy, tile_rows)
    own, found = LayerSizes(128, 448, 4, 2, 32, 2, 2), predicted(cfg)
    assert found.host == host_bytes_per_token(own, policy) * 1024
    assert found.saved - found.host == saved_bytes_per_token(own, policy, is_tiled=tile_rows > 0) * 1024


def test_parameters_of_the_known_models_are_counted_exactly():
    model = config().model
    names = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "head_dim")
    for sizes, more, total in (((128256, 4096, 32, 32, 8, 14336, None), {}, 8_030_261_248),
                               ((151936, 5120, 64, 64, 8, 25600, 128), dict(qk_norm=True), 32_762_123_264),
                               ((128256, 2048, 16, 32, 8, 8192, 64), dict(qk_norm=False, tie_embeddings=True), 1_235_814_400)):
        for key, value in {**dict(zip(names, sizes)), **more}.items():
            setattr(model, key, value)
        assert sizes_of(model).total == total


def test_a_rank_holds_as_much_in_every_ring_of_the_same_rows_and_of_shards_its_share():
    parts = {ring: predicted(config(rows=65536, ring=ring), ring).parts for ring in (4, 64)}
    sizes = {ring: sum(found.values()) - found["intervals of masks"] for ring, found in parts.items()}
    assert sizes[64] == pytest.approx(sizes[4], rel=0.03)
    cfg = config(rows=1024, ring=8)
    parts = step_memory(Job(cfg, (Mask(),), 8, 8, 1, 8, 1, 8, "block"), GPUS["h200"]).moments["optimizer"]
    assert parts["weights"] == pytest.approx(4 * sizes_of(cfg.model).total / 8)
    assert parts["optimizer state"] == 2 * parts["weights"]


def test_memory_is_compared_with_what_a_process_can_have_after_slack_and_context():
    found = predicted(config())
    assert found.reserved_gib == pytest.approx(found.live_gib * 1.03 + 2.0)
    assert found.live_gib == pytest.approx(sum(found.parts.values()) / GIB)
