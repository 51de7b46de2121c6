"""A Llama-style decoder whose attention is handed in; knows nothing of ranks."""
from .transformer import ModelConfig, Transformer

__all__ = ["ModelConfig", "Transformer"]
