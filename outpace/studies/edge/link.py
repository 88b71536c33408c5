"""One device and one server: the time per token of each way to divide the work, by the formulas of `outpace theory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outpace.core import theory
from outpace.core.errors import check_range

MAX_LENGTH = 64


@dataclass(frozen=True)
class OneLink:
    """Times in ms; `device_pass` is that of a target pass on the device, None if the target does not fit there."""

    device_step: float
    server_pass: float
    rtt: float
    acceptance: tuple[float, ...]
    device_pass: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError for a time that is not positive, and for a negative round trip."""
        for name, time in (("device-step", self.device_step), ("server-pass", self.server_pass)):
            check_range(name, time, 1e-6, 1e9)
        check_range("rtt", self.rtt, 0.0, 1e9)
        if self.device_pass is not None:
            check_range("device-pass", self.device_pass, 1e-6, 1e9)


class LinkChoice(NamedTuple):
    """A way to write with its time per token in ms; `length` is the best draft length, None if nothing is drafted."""

    name: str
    time: float
    length: int | None = None
    note: str = ""  # why `advice` does not consider it


def choices(link: OneLink) -> list[LinkChoice]:
    """Return all ways to write, with their best draft lengths."""
    found = [LinkChoice("draft model alone", link.device_step, None, "writes the draft model's text")]
    if link.device_pass is not None:
        time, length = _sequential(link, link.device_pass, 0.0, 0)
        found.append(LinkChoice("device alone, sequential drafting", time, length))
    found.append(LinkChoice("server alone", link.server_pass))
    found.append(LinkChoice("device drafts, sequential", *_sequential(link, link.server_pass, link.rtt, 1)))
    found.append(LinkChoice("device drafts, PEARL", *_pearl(link)))
    limit = theory.card_limit(theory.tokens_per_rejection(link.acceptance), 1.0, link.device_step / link.server_pass)
    found.append(LinkChoice("device drafts, CARD", link.server_pass / limit, None, "a bound, for a link without delay"))
    return found


def _sequential(link: OneLink, target_pass: float, delay: float, shortest: int) -> tuple[float, int]:
    """Return the time per token of sequential drafting at the best length from `shortest` on, and that length."""
    positions = (*link.acceptance, *[link.acceptance[-1]] * MAX_LENGTH)
    return min(
        (
            (gamma * link.device_step + delay + target_pass) / theory.expected_tokens_by_position(positions[:gamma]),
            gamma,
        )
        for gamma in range(shortest, MAX_LENGTH + 1)
    )


def _pearl(link: OneLink) -> tuple[float, int]:
    """Return the time per token of PEARL and its best length; a step waits for the drafts and for the server."""
    served = link.rtt + link.server_pass
    return min(
        (max(gamma * link.device_step, served) / theory.pearl_tokens(link.acceptance, gamma), gamma)
        for gamma in range(1, MAX_LENGTH + 1)
    )


def advice(link: OneLink) -> str:
    """Say in one sentence what to do."""
    best, second = sorted((one for one in choices(link) if not one.note), key=lambda one: one.time)[:2]
    drafting = f" with {best.length} drafted tokens" if best.length else ""
    return (
        f"best is {best.name}{drafting}, {best.time:.1f} ms per token; the second best, {second.name}, takes"
        f" {second.time:.1f} ms"
    )
