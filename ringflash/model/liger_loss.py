"""Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989) as the loss of a head: train.loss=liger."""
import torch
from torch import Tensor

from ..loss import IGNORE_INDEX


def require_liger() -> None:
    """Raises ValueError where the package, or the GPU that its kernels need, is missing."""
    try:
        import liger_kernel.transformers.functional  # noqa: F401
    except ImportError as error:
        raise ValueError(f"train.loss=liger: the package liger-kernel cannot be imported ({error}); nearest: chunked") from error
    if not torch.cuda.is_available():
        raise ValueError("train.loss=liger: its kernels need a GPU, and there is none here; nearest: chunked")


def liger_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """As chunked_cross_entropy's loss_sum, for hidden [B, S, D], weight [V, D], labels int64 [B, S], S > 0, with Liger's precision:
    logits are rounded to the dtype of the products before the softmax, and so are the gradients, made in the forward already. The
    weight's is summed over chunks in fp32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    return liger_fused_linear_cross_entropy(
        hidden.flatten(0, -2), weight, labels.flatten(), ignore_index=IGNORE_INDEX, lse_square_scale=z_loss, reduction="sum",
        accum_dtype=torch.float32)
