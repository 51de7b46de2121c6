"""Exact, distributed long-context attention for PyTorch training.

Every GPU keeps its own queries; keys and values travel round a ring of GPUs; a flash kernel folds each arriving block into
running fp32 (out, lse) with the online softmax (Liu et al. 2023, "Ring Attention with Blockwise Transformers").
"""
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "kernels").is_dir():
    # Note [Where kernels live]: in a checkout the sibling folders kernels/, launch/, configs/ and tests/ are subpackages.
    __path__.append(str(_ROOT))

__version__ = "0.1.0"

_EXPORTS = {
    "ring_attention": "attention",
    "simulate": "simulation",
    "Mask": "mask",
    "Layout": "layout",
    "shard": "sharding",
    "unshard": "sharding",
    "shard_batch": "sharding",
    "ShardedBatch": "sharding",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    # Lazy, so that `import ringflash.mask` (numpy alone) does not import torch, and no module hides a function of its name.
    if name in _EXPORTS:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
