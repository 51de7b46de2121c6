"""The figures of a run as PNGs."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

NAN = float("nan")


def draw(path: Path, paint: Callable, *, rows: int = 1, size: tuple[float, float] = (7, 4)) -> None:
    """paint(axes) on a fresh figure with a grid (rows > 1: a list of axes with one x axis), written to path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, figsize=size, dpi=120, sharex=True)
    for each in axes if rows > 1 else (axes,):
        each.grid(alpha=0.3)
    paint(axes)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def values(rows: list[dict], key: str) -> list[float]:
    """Of each row; NaN, which leaves a gap, where it has none (a skipped step has no loss)."""
    return [NAN if row.get(key) is None else row[key] for row in rows]


def plot_loss(path: Path, train: list[dict], evals: list[dict], unigram_nats: float) -> None:
    """Loss over steps, with the entropy that no model of single tokens can beat."""
    def paint(axes) -> None:
        axes.plot(values(train, "step"), values(train, "loss"), linewidth=1, label="training")
        if evals:
            axes.plot(values(evals, "step"), values(evals, "heldout_loss"), "o-", markersize=4, label="held-out")
        axes.axhline(unigram_nats, linestyle="--", linewidth=1, color="0.5", label="unigram entropy")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per token)")
        axes.set_ylim(bottom=0)
        axes.legend()

    draw(path, paint)


def plot_speed(path: Path, train: list[dict]) -> None:
    """Throughput, MFU where it is known, memory and the wait for data, over steps."""
    lines = [("tokens_per_s", "tokens/s"), ("mfu", "MFU"), ("peak_memory_gib", "peak memory\n(GiB, rank 0)"),
             ("data_wait_ms", "data wait\n(ms, rank 0)")]
    shown = [(key, label) for key, label in lines if any(row.get(key) is not None for row in train)]

    def paint(axes) -> None:
        for each, (key, label) in zip(axes, shown):
            each.plot(values(train, "step"), values(train, key), linewidth=1)
            each.set_ylabel(label)
            each.set_ylim(bottom=0)
        axes[-1].set_xlabel("optimizer step")

    if len(shown) > 1:
        draw(path, paint, rows=len(shown), size=(7, 1 + 1.5 * len(shown)))


def plot_positions(path: Path, by_position: list[dict], when: str) -> None:
    """Held-out loss over the number of tokens that a row can look back on."""
    def paint(axes) -> None:
        edges = [bucket["start"] for bucket in by_position] + [by_position[-1]["stop"]]
        axes.stairs([bucket["loss"] for bucket in by_position], edges)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xlabel("tokens before it in its document")
        axes.set_ylabel("held-out loss (nats per token)")
        axes.set_title(when, fontsize=9)

    draw(path, paint)
