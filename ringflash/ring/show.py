"""Shows a plan: who computes what in each step, what travels, how even the work is.

    python -m ringflash.ring.show --seq-len 32 --cp-size 4 --layout zigzag --mask causal [--window-size 63 0] [--png out.png]
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from ringflash.layout import KINDS, LAYOUTS, Layout
from ringflash.mask import Mask
from ringflash.ring.documents import parse_documents
from ringflash.ring.gathered import own_keys_of, pairs_of
from ringflash.ring.message import Message
from ringflash.ring.plan import PASSES, Plan, build_plan
from ringflash.ring.ranges import RowRanges
from ringflash.ring.rotate import ROTATES, Heads, choose
from ringflash.ring.routes import LANES, ROUTINGS, UP

MASKS = ("causal", "full")
_ARROWS = {1: "to the next rank", -1: "to the previous rank"}


def text(plan: Plan, pass_: str = "forward") -> str:
    """The plan as a table with a summary. pass_: "forward", or "backward" to see the gradients travel too."""
    rows = [("step", "rank", "reads", "rows", "pairs", "receives", "sends")]
    for step in range(_num_steps(plan, pass_)):
        for rank in range(plan.cp_size):
            reads = _reads(plan, rank, step, pass_)
            recvs, sends = plan.recvs(rank, step, pass_), plan.sends(rank, step, pass_)
            if not (reads or recvs or sends):
                continue
            rows.append((
                str(step),
                str(rank),
                " ".join(("own" if owner == rank else f"rank {owner}") + ("", " first keys")[part] for owner, _, part, _ in reads) or "-",
                " ".join(_shorten(of_block) for _, of_block, _, _ in reads) or "-",
                f"{pairs_of(plan, rank, step, pass_):,}",
                "; ".join(_describe(m, "from", m.src) for m in recvs) or "-",
                "; ".join(_describe(m, "to", m.dst) for m in sends) or "-",
            ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join([title(plan), *lines, summary(plan)])


def title(plan: Plan) -> str:
    layout, layout_k, mask = plan.layout, plan.layout_k, plan.mask
    if plan.rotates == "q":
        return f"the Q side rotates: {title(build_plan(mask.mask, layout_k, layout))}"
    keys = "" if layout_k.geometry == layout.geometry else f", keys {layout_k.kind} of {layout_k.seq_len:,} tokens"
    return f"{layout.kind}, {layout.seq_len:,} tokens on {plan.cp_size} ranks{keys}, {mask!r}"


def summary(plan: Plan) -> str:
    """One line: bytes as a fraction of the full rotation, routing and directions and why, how even the work is."""
    moved = f"moves {plan.rotation_fraction:.2f} of the full rotation's bytes in {plan.num_steps - 1} "
    moved += ("hop" if plan.routing == "ring" else "step") + ("" if plan.num_steps == 2 else "s")
    return "; ".join((moved, *routing_used(plan), _evenness_text(plan)))


def routing_used(plan: Plan) -> list[str]:
    """How rows reach their readers, and why."""
    if not plan.messages("forward"):
        return ["nothing travels"]
    names = {"ring": "neighbour ring", "direct": "owner to reader directly", "allgather": "all that is read in one step"}
    rival = "direct" if plan.routing == "ring" else "ring"
    name, other_name = names[plan.routing], names[rival]
    ours, other = plan.rows_by_routing["ring" if plan.routing == "ring" else "direct"], plan.rows_by_routing[rival]
    compared = "as many bytes" if other == ours else f"{other / (plan.layout_k.seq_len * (plan.cp_size - 1)):.2f}"
    why = f", {plan.reason}" if plan.reason else ""
    used = [f"{name}{why} ({other_name}: {compared})"]
    return [*used, lanes_used(plan)] if plan.routing == "ring" else used


def lanes_used(plan: Plan) -> str:
    """Which directions a ring uses, and why."""
    sent = {lane: sum(m.num_rows for m in plan.messages("forward") if m.lane == lane) for lane in LANES}
    used = [lane for lane in LANES if sent[lane]]
    if not used:
        return "nothing travels"
    if len(used) == 2:
        return f"both directions, each range the shorter way ({sent[UP]:,} rows to the next rank, {sent[-UP]:,} to the previous)"
    if len(plan.lanes) == 1:
        return f"all {_ARROWS[used[0]]}, as demanded"
    other = build_plan(plan.mask, plan.layout, plan.layout_k, lanes=(-used[0],)).rotation_fraction
    return f"all {_ARROWS[used[0]]} (the other way: {other:.2f})"


def evenness(plan: Plan) -> list[float]:
    """Per forward step, the allowed pairs of the busiest rank over those of the mean rank (1.0: even; 0.0: nobody works)."""
    result = []
    for step in range(plan.num_steps):
        pairs = [pairs_of(plan, rank, step, "forward") for rank in range(plan.cp_size)]
        result.append(max(pairs) * plan.cp_size / sum(pairs) if sum(pairs) else 0.0)
    return result


def _evenness_text(plan: Plan) -> str:
    totals = [sum(plan.num_pairs(rank, step) for step in range(plan.num_steps)) for rank in range(plan.cp_size)]
    if not sum(totals):
        return "no pair is allowed"
    busiest = max(totals) * plan.cp_size / sum(totals)
    waiting = sum(max(pairs_of(plan, rank, step, "forward") for rank in range(plan.cp_size)) for step in range(plan.num_steps))
    steps = waiting * plan.cp_size / sum(totals)
    return f"busiest rank {busiest:.2f}x the mean over all steps, {steps:.2f}x when each step waits for its busiest"


def png(plan: Plan, path: str | Path) -> None:
    """Draws the plan: a grid of ranks and steps, coloured by the owner of the block, shaded by the allowed pairs, with the rows
    that leave each cell; below, how even each step is. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size, steps = plan.cp_size, plan.num_steps
    width, height = min(max(9.0, 1.5 + 1.15 * steps), 40.0), min(max(4.0, 2.4 + 0.62 * size), 30.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid, bars = figure.subplots(2, 1, sharex=True, height_ratios=(max(2.0, 0.62 * size), 1.2))
    _draw_grid(plan, grid)
    grid.set(xlim=(-0.5, steps - 0.5), ylim=(size - 0.5, -0.5), yticks=range(size), ylabel="rank")
    grid.set_title(fill(title(plan), 100), fontsize=10)
    grid.tick_params(length=0)
    values = evenness(plan)
    bars.bar(range(steps), values, width=0.7, color="#4c6a92")
    for step, value in enumerate(values):
        bars.annotate(f"{value:.2f}", (step, value), ha="center", va="bottom", fontsize=8)
    bars.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    bars.set(xlabel="step", ylabel="pairs,\nmax / mean", xticks=range(steps), ylim=(0, 1.25 * max([1.0, *values])))
    leave = "v, ^: rows of k, v that leave for the next, the previous rank"
    if plan.routing != "ring":
        leave = "to r: rows of k, v that leave for rank r"
    legend = f"{leave}; numbers in cells: allowed (query, key) pairs"
    figure.supxlabel(fill(summary(plan), 110) + "\n" + legend, fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_grid(plan: Plan, axes) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    palette = colormaps["tab10" if plan.cp_size <= 10 else "tab20"]
    most = max((pairs for r in range(plan.cp_size) for s in range(plan.num_steps) for *_, pairs in _reads(plan, r, s, "forward")),
               default=0)
    for rank in range(plan.cp_size):
        for step in range(plan.num_steps):
            reads = _reads(plan, rank, step, "forward")
            frame = dict(facecolor="none", edgecolor="#cccccc", linewidth=0.6)
            axes.add_patch(Rectangle((step - 0.46, rank - 0.44), 0.92, 0.88, **frame))
            for i, (owner, _, _, pairs) in enumerate(reads):
                shade = 0.12 + 0.78 * pairs / most if pairs else 0.0
                left, width = step - 0.46 + 0.92 * i / len(reads), 0.92 / len(reads)
                colour = palette(owner % palette.N)
                axes.add_patch(Rectangle((left, rank - 0.44), width, 0.88, facecolor=colour, alpha=shade))
                label = f"kv {owner}\n{_count(pairs)}"
                axes.text(left + width / 2, rank - 0.08, label, ha="center", va="center", fontsize=7)
            signs = {UP: "v", -UP: "^"}
            sent = [f"{signs.get(m.lane, f'to {m.dst}:')} {_count(m.num_rows)}" for m in plan.sends(rank, step, "forward")]
            axes.text(step, rank + 0.33, "  ".join(sent), ha="center", va="center", fontsize=6, color="#333333")


def _reads(plan: Plan, rank: int, step: int, pass_: str) -> list[tuple[int, RowRanges, int, int]]:
    """What a rank reads in a step: owner, rows, part and pairs of each block, then of its own keys where they wait for those that
    arrive."""
    visits = plan.visits(rank, step)
    if step == 0 and visits:
        main, *others = (visit.num_pairs for visit in visits)
        pairs = [pairs_of(plan, rank, 0, pass_) - sum(others), *others]
    else:
        pairs = [visit.num_pairs for visit in visits]
    reads = [(visit.owner, visit.rows, visit.part, of_block) for visit, of_block in zip(visits, pairs)]
    rows, of_own = own_keys_of(plan, rank, step, pass_) if step else ((), 0)
    return [*reads, (rank, rows, 0, of_own)] if rows else reads


def _num_steps(plan: Plan, pass_: str) -> int:
    return plan.num_steps if pass_ == "forward" else plan.num_backward_steps


def _describe(message: Message, preposition: str, rank: int) -> str:
    kind = "grad " if message.is_gradient else ""
    return f"{kind}{_shorten(message.rows)} of {message.owner} {preposition} {rank}"


def _shorten(rows: RowRanges) -> str:
    shown = ",".join(f"{start}:{stop}" for start, stop in rows[:2])
    return f"{shown},..{rows[-1][1]}" if len(rows) > 2 else shown or "none"


def _count(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= unit:
            scale = 10**3 if name == "k" else unit
            return f"{number / scale:.3g}{name}"
    return str(number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringflash.ring.show", description="Show the plan of a ring.")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--cp-size", type=int, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--window-size", type=int, nargs=2, default=(-1, -1), metavar=("LEFT", "RIGHT"))
    parser.add_argument("--cu-seqlens", type=int, nargs="+", help="document boundaries, from 0")
    parser.add_argument("--documents", help="packed documents of random lengths instead, e.g. lognormal:sigma=1.0,seed=0 (also "
                        "mean, longest, first: the length of one of them)")
    parser.add_argument("--cu-seqlens-k", type=int, nargs="+", help="those of the keys, when they differ")
    parser.add_argument("--prefix-lens", type=int, nargs="+", help="first keys of each document that all of it sees")
    parser.add_argument("--chunk-size", type=int, help="positions of a chunk, which sees itself only")
    parser.add_argument("--first-tokens", type=int, default=0, help="first keys of each document that a window keeps")
    parser.add_argument("--seq-len-k", type=int, help="length of keys, when it differs (the ends are aligned)")
    parser.add_argument("--layout-k", choices=KINDS, help="layout of keys, when it differs")
    parser.add_argument("--routing", choices=("auto", *ROUTINGS), default="auto")
    parser.add_argument("--pass", dest="pass_", choices=PASSES, default="forward")
    parser.add_argument("--heads", type=int, nargs=3, metavar=("HQ", "HKV", "D"), help="say what rotates in the backward, in 16 bit")
    parser.add_argument("--rotate", choices=ROTATES, default="auto", help="with --heads")
    parser.add_argument("--summary", action="store_true", help="no table, but how long planning took")
    parser.add_argument("--png", type=Path, help="also draw the plan into this file")
    options = parser.parse_args(arguments)
    try:
        prefixes = options.prefix_lens
        if prefixes is not None and len(prefixes) == 1:
            prefixes = prefixes[0]  # every document's
        documents = options.cu_seqlens
        if options.documents is not None:
            if documents is not None:
                raise ValueError("--documents together with --cu-seqlens: give one of them")
            documents = parse_documents(options.documents, options.seq_len)
        mask = Mask(causal=options.mask == "causal", window_size=tuple(options.window_size), cu_seqlens=documents,
                    cu_seqlens_k=options.cu_seqlens_k, prefix_lens=prefixes, chunk_size=options.chunk_size,
                    first_tokens=options.first_tokens)
        begin = time.perf_counter()
        layout = layout_k = Layout(options.layout, options.seq_len, options.cp_size, mask)
        if options.layout_k is not None or options.seq_len_k is not None:
            layout_k = Layout(options.layout_k or layout.kind, options.seq_len_k or options.seq_len, options.cp_size, mask)
        made = time.perf_counter()
        plan = build_plan(mask, layout, layout_k, routing=options.routing)
        planned = time.perf_counter()
    except ValueError as error:
        parser.error(str(error))
    if options.heads is not None:
        num_heads, num_kv_heads, head_dim = options.heads
        if min(options.heads) < 1 or num_heads % num_kv_heads:
            parser.error(f"--heads {num_heads} {num_kv_heads} {head_dim}: HKV must divide HQ, and all must be >= 1")
        rotation = choose(plan, Heads(1, num_heads, num_kv_heads, head_dim, itemsize=2), options.rotate)
        print(f"{num_heads} query and {num_kv_heads} kv heads of {head_dim}: {rotation.reason}")
        if options.pass_ == "backward":
            plan = rotation.plan
    if layout.reason:
        print(f"layout {options.layout}: {layout.reason}")
    if options.summary:
        print(f"{title(plan)}\n{summary(plan)}")
        print(f"layout made in {1000 * (made - begin):.1f} ms, plan in {1000 * (planned - made):.1f} ms")
    else:
        print(text(plan, options.pass_))
    if options.png is not None:
        try:
            options.png.parent.mkdir(parents=True, exist_ok=True)
            png(plan, options.png)
        except (OSError, ValueError, ImportError) as error:  # no such format; no matplotlib
            parser.error(f"--png {options.png}: {error}")
        print(f"drawn: {options.png}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
