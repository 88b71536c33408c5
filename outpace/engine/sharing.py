"""How requests share a pass: its room for prompts, and its rows for trees."""

from __future__ import annotations

from collections.abc import Sequence


def share_prompt_room(remaining: Sequence[int], room: int) -> list[int]:
    """How many tokens of each prompt are read in a pass with `room` for prompts. `remaining` are the tokens that are
    not read yet, in the order in which the requests came.

    Half of the room goes to the oldest, so that it ends; the rest to the shortest remaining, so that a long prompt
    keeps no short one waiting. What these leave goes to the oldest again.
    """
    given = [0] * len(remaining)
    if not remaining:
        return given
    given[0] = min(remaining[0], room if len(remaining) == 1 else room - room // 2)
    left = room - given[0]
    for place in sorted(range(1, len(remaining)), key=remaining.__getitem__):
        given[place] = min(remaining[place], left)
        left -= given[place]
    given[0] += min(remaining[0] - given[0], left)
    return given
