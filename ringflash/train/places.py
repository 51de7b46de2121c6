"""Where a rank stands inside the model, for the messages of the watchdog: layers tell it, forward and backward."""
from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ringflash.ring import watchdog


def tell_layers(blocks: Iterable[nn.Module]) -> None:
    """From now on the watchdog knows in which of these layers this process stands: "layer 0" and so on."""
    for index, block in enumerate(blocks):
        _tell(f"layer {index}", block)


def _tell(name: str, block: nn.Module) -> None:
    def enter(*_) -> None:
        watchdog.at(layer=name)

    def leave(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        # The backward of a layer begins with the gradient of what it returned; a recomputed block runs inside that too.
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(enter)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
