"""Every kind of model that ringflash.hf takes: its attention is transformers' own, the rest computes each row from that row."""
import pytest
import torch

pytest.importorskip("transformers")

from ringflash import hf, hf_attention, shard_batch  # noqa: E402
from ringflash.hf_config import KNOWN, layer_masks  # noqa: E402
from ringflash.layout import Layout  # noqa: E402
from ringflash.tests.support.hf_cases import FAMILIES, VOCAB, config_of, gradients, model_of, own_attention  # noqa: E402

CU = [0, 13, 14, 40]


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, CU[-1]), generator=torch.Generator().manual_seed(seed))


def test_every_known_kind_is_one_of_these_cases():
    assert set(KNOWN) == set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_every_gradient_on_packed_documents_are_those_of_transformers_own_attention(kind):
    config, tokens = config_of(kind), batch()
    reference, model = model_of(config), model_of(config)
    hf.enable(model, kernel="reference")
    sharded = shard_batch({"tokens": tokens, "cu_seqlens": CU}, masks=hf.masks(model))
    loss, expected = own_attention(reference, tokens, sharded.labels, CU, sharded.num_valid)
    found = model(**hf.inputs(sharded)).loss
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients(model).items():
        scale = max(float(expected[name].abs().max()), 1e-3)
        assert float((gradient - expected[name]).abs().max()) < 2e-5 * scale + 1e-6, name


@pytest.mark.parametrize("kind", FAMILIES)
def test_but_for_attention_a_row_depends_on_its_own_token_and_position_alone(kind):
    model = model_of(config_of(kind)).eval()
    hf_attention.attach(model, lambda q, k, v, **_: v.repeat_interleave(q.shape[2] // v.shape[2], dim=2))
    tokens, masks = batch(), layer_masks(model.config)
    whole = Layout("zigzag", CU[-1], 1, masks)
    parts = Layout("zigzag", CU[-1], 3, masks)
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=torch.arange(CU[-1])[None], layout=whole).logits
        for rank in range(3):
            rows = torch.from_numpy(parts.positions(rank))
            part = model(input_ids=tokens[:, rows], position_ids=rows[None], layout=parts).logits
            assert float((part - logits[:, rows]).abs().max()) < 1e-5 * max(float(logits.abs().max()), 1.0)
