"""Ranks agree before they exchange anything whose size they derive from their own arguments (Note [Agreement] in DESIGN.md).

One collective of fixed size, which every rank must reach unconditionally: each states its arguments, or why it refuses its own,
and all raise the same error, or none does.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringflash.mesh import Ranks, ranks_of
from ringflash.ring import watchdog
from ringflash.ring.exchange import group_backends

if TYPE_CHECKING:
    from ringflash.layout import Layout

_PAYLOAD_BYTES = 8192
_VALUE_CHARS = 160
_PROBLEM_CHARS = 1500
_ERRORS = {error.__name__: error for error in (ValueError, NotImplementedError, RuntimeError)}
# Whatever validation raises is told: the others are on their way to compare arguments, also when it is a bug or a broken disk.
REFUSALS = (Exception,)


@dataclass(frozen=True)
class _Statement:
    fields: dict[str, str]
    problem: tuple[str, str] | None                         # (name of the error, text)
    count: int


def agree(
    group: Any, what: str, fields: Mapping[str, object], *, problem: Exception | None = None, count: int = 0
) -> list[int]:
    """Compare `fields` over all ranks of the group (or what else ranks_of takes); returns each rank's `count`, which may differ.

    problem: why this rank refuses its own arguments. If any rank has one, or a field differs, every rank raises the same error,
    which names who said or has what: of the class that the problems share (RuntimeError for one that is none of ValueError,
    NotImplementedError and RuntimeError), else ValueError. `what` begins its text.
    """
    stated: dict[str, str] = {}
    try:
        stated = {str(key): _shorten(str(value)) for key, value in fields.items()}
    except REFUSALS as error:
        problem = problem or error
    own = _Statement(stated, None if problem is None else _state_problem(problem), count)
    statements = _gather(ranks_of(group), what, own)
    text, error = _compare(what, statements)
    if error is not None:
        raise error(text) from problem
    return [statement.count for statement in statements]


def agree_layout(layout: Layout, group: Any, agreed: Mapping[str, object] | object | None = None, *,
                 what: str = "Layout") -> str:
    """Agree on a layout, its masks and whatever else `agreed` names; returns the token of what was agreed on.

    agreed: a mapping of names to values (compared by their str), or any single value, or None.
    """
    ranks = ranks_of(group)
    problem, fields = None, {}
    try:
        check_ranks(layout, ranks)
        fields = layout_fields(layout)
        if agreed is not None:
            named = agreed if isinstance(agreed, Mapping) else {"agree": agreed}
            fields.update({str(key): str(value) for key, value in named.items()})
    except REFUSALS as error:
        if ranks.size == 1:
            raise
        problem = error
    if ranks.size > 1:
        agree(ranks, what, fields, problem=problem)
    return token_of(fields)


def check_ranks(layout: Layout, ranks: Ranks) -> None:
    """ValueError unless these ranks are what the layout is made for."""
    if layout.num_ranks != ranks.size:
        ulysses = "" if layout.ulysses_size == 1 else f" with ulysses_size={layout.ulysses_size}: {layout.num_ranks} ranks"
        raise ValueError(f"layout.cp_size={layout.cp_size}{ulysses}: the group has {ranks.size} ranks")
    if ranks.ulysses is not None and layout.ulysses_size != ranks.ulysses_size:
        sizes = f"{ranks.ring_size} x {ranks.ulysses_size}"
        raise ValueError(f"layout.ulysses_size={layout.ulysses_size}: the mesh has {sizes} ranks, ring x ulysses; "
                         f"make the Layout with cp_size={ranks.ring_size}, ulysses_size={ranks.ulysses_size}")


def layout_fields(layout: Layout, key: str = "layout") -> dict[str, object]:
    """What identifies a layout and its masks."""
    fields: dict[str, object] = {
        f"{key}.kind": layout.kind, f"{key}.seq_len": layout.seq_len, f"{key}.cp_size": layout.cp_size,
        f"{key}.ulysses_size": layout.ulysses_size}
    if layout.kind == "balanced":
        fields[f"{key} rows"] = rows_field(layout)
    for index, mask in enumerate(layout.masks):
        fields[f"{key}.masks[{index}]"] = mask_field(mask)
    return fields


def rows_field(layout: Layout) -> str:
    """The rows of all ranks as text that differs when they do."""
    return f"{layout.kind} of {layout.seq_len} #{hashlib.sha256(layout.spec.numpy().tobytes()).hexdigest()[:12]}"


def mask_field(mask: object) -> str:
    """A mask as text that differs when the mask does: its repr may leave out boundaries."""
    return f"{mask!r} #{hashlib.sha256(mask.spec.numpy().tobytes()).hexdigest()[:12]}"


def token_of(fields: Mapping[str, object]) -> str:
    text = json.dumps({key: str(value) for key, value in fields.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _state_problem(problem: Exception) -> tuple[str, str]:
    """(name of the class to raise, text that fits the payload whatever its characters)."""
    # The first that fits, in this order: a NotImplementedError is a RuntimeError too, by inheritance.
    name = next((n for n, error in _ERRORS.items() if isinstance(problem, error)), None)
    try:
        text = str(problem)
    except REFUSALS:
        text = "(an error that cannot be printed)"
    text = text if name is not None else f"{type(problem).__name__}: {text}"
    plain = (c if " " <= c <= "~" or c == "\n" else ascii(c)[1:-1] for c in text[:_PROBLEM_CHARS])
    return name or "RuntimeError", "".join(plain)[:_PROBLEM_CHARS]


def _shorten(value: str) -> str:
    if len(value) <= _VALUE_CHARS:
        return value
    return f"{value[:_VALUE_CHARS - 20]}... #{hashlib.sha256(value.encode(errors='backslashreplace')).hexdigest()[:12]}"


def _gather(ranks: Ranks, what: str, own: _Statement) -> list[_Statement]:
    text = json.dumps([own.fields, own.problem, own.count]).encode()
    if len(text) > _PAYLOAD_BYTES:
        # Stated, not raised: the others, who may have less to say, wait for this rank.
        problem = ValueError(f"the arguments to agree on take {len(text)} bytes, more than {_PAYLOAD_BYTES}")
        text = json.dumps([{}, own.problem or _state_problem(problem), own.count]).encode()
    # The host's own network where there is one: then no GPU needs to be waited for.
    on_host = "cpu" in group_backends(ranks.groups[0])
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    payload = torch.frombuffer(bytearray(text.ljust(_PAYLOAD_BYTES)), dtype=torch.uint8).to(device)
    position = watchdog.Position(
        "agreement", watchdog.next_call("agreement"), 0, f"cp rank {ranks.rank} (global rank {dist.get_rank()})",
        (f"comparing the arguments of {what} with those of all {ranks.size} ranks",))
    with watchdog.waiting(position):
        try:
            texts = [bytes(x.cpu().numpy()) for x in gather_in_order(payload, ranks)]
        except RuntimeError as error:
            raise RuntimeError(f"{what}: {position.describe()} failed: {error}") from error
    return [_Statement(fields, tuple(problem) if problem else None, count) for fields, problem, count in map(json.loads, texts)]


def gather_in_order(x: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """x (contiguous, of one shape on all ranks) of every rank, in their order; a view each. One collective per axis."""
    whole = x[None]
    for group in ranks.groups:
        gathered = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, whole, group=group)
        whole = torch.cat(gathered)
    return list(whole)


def _compare(what: str, statements: Sequence[_Statement]) -> tuple[str, type[Exception] | None]:
    problems: dict[str, list[int]] = {}
    kinds = set()
    for rank, statement in enumerate(statements):
        if statement.problem is not None:
            kinds.add(statement.problem[0])
            problems.setdefault(statement.problem[1], []).append(rank)
    lines = [text if len(ranks) == len(statements) else f"{_ranks(ranks)}: {text}" for text, ranks in problems.items()]
    keys = dict.fromkeys(key for statement in statements for key in statement.fields)
    # A rank that refused its arguments may have stated only some of them.
    sound = [rank for rank, statement in enumerate(statements) if statement.problem is None]
    for key in keys:
        values: dict[str, list[int]] = {}
        for rank in sound:
            values.setdefault(statements[rank].fields.get(key, "absent"), []).append(rank)
        if len(values) > 1:
            lines.append(f"{key} differs: " + "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items()))
    if not lines:
        return "", None
    return f"{what}: " + " | ".join(lines), _ERRORS[kinds.pop()] if len(kinds) == 1 else ValueError


def _ranks(ranks: Sequence[int]) -> str:
    return f"cp rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
