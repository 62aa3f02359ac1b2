"""The blocks behind a cut, and which of them an auxiliary model leaves out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsl_sage.split.auxiliaries.rehearsal import SeenCall


@dataclass(frozen=True)
class Block:
    """Consecutive modules that are kept or left out together, and the blocks inside."""

    modules: tuple[SeenCall, ...]
    units: tuple[SeenCall, ...] = ()


def blocks_of(calls: list[SeenCall]) -> list[Block]:
    """The blocks among these calls: modules made of several that turn features into features, before the last one."""
    holding = [call for call in calls if call.has_parameters]
    composite = [call for call in holding[:-1] if call.is_composite and call.keeps_rank]
    if composite:
        return [Block((call,), _units(call)) for call in composite]
    blocks: list[list[SeenCall]] = []
    for call in holding[:-1]:  # a norm belongs to the layer before it
        if max(parameter.dim() for parameter in call.module.parameters()) > 1 or not blocks:
            blocks.append([])
        blocks[-1].append(call)
    return [Block(tuple(block)) for block in blocks]


def _units(call: SeenCall) -> tuple[SeenCall, ...]:
    """The elements of a sequence inside of a block, such as the residual blocks of a stage."""
    inner = [unit for unit in call.inner if unit.container and unit.is_composite and unit.keeps_rank]
    return tuple(inner) if len(inner) > 1 else ()


def all_but(blocks: list[Block], kept: int) -> list[SeenCall]:
    """What is left out where the first blocks are kept."""
    return [call for block in blocks[kept:] for call in block.modules]


def half(blocks: list[Block]) -> list[SeenCall]:
    """What "half" leaves out."""
    if blocks and (units := blocks[0].units):
        return [*units[math.ceil(len(units) / 2) :], *all_but(blocks, 1)]
    return all_but(blocks, math.ceil(len(blocks) / 2))


def steps(blocks: list[Block]) -> list[list[SeenCall]]:
    """What is left out, from all blocks to none, unit by unit."""
    found = [all_but(blocks, 0)]
    for kept, block in enumerate(blocks):
        for units in range(1, len(block.units)):
            found.append([*block.units[units:], *all_but(blocks, kept + 1)])
        found.append(all_but(blocks, kept + 1))
    return found
