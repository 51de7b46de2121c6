"""Where a rank stands inside the model, for the messages of the watchdog: modules tell it, forward and backward."""
from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ringflash.ring import watchdog


def tell_layers(model: nn.Module) -> list[str]:
    """From now on the watchdog knows in which layer this process stands. Returns their names, "layers.0" and so on: the members of
    every ModuleList that is called layers, whatever model it is."""
    named = list(_layers(model))
    for name, layer in named:
        _tell(name, layer)
    return [name for name, _ in named]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "layers":
            yield from ((f"{name}.{index}", layer) for index, layer in enumerate(module))


def _tell(name: str, layer: nn.Module) -> None:
    def enter(*_) -> None:
        watchdog.at(layer=name)

    def leave(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        # The backward of a layer begins with the gradient of what it returned; a recomputed block runs inside that too.
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(enter)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
