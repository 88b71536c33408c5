"""Whether a request can ever run on an engine: said when it is submitted."""

from __future__ import annotations

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.needs import Needs
from outpace.core.types import Adjustments, Request
from outpace.models.base import Model


def check_rule_needs(request: Request, needs: Needs) -> None:
    """UserError for a rule whose hidden states an engine's passes do not show."""
    missing = [layer for layer in request.rule.needs.layers if layer not in needs.layers]
    if missing:
        name = type(request.rule).__name__
        raise UserError(
            f"the rule {name} needs hidden states after layers {missing}, which this engine does not show: give them"
            " to the engine as its needs"
        )


def check_request(request: Request, target: Model) -> None:
    """UserError for a request that can never run on this target."""
    if not request.prompt:
        raise UserError("the prompt has no tokens, at least one is needed")
    most = target.max_positions
    if len(request.prompt) >= most:
        raise UserError(f"the prompt has {len(request.prompt)} tokens, the target's context holds {most}")
    check_whole("max_tokens", request.max_tokens, 1)
    check_whole("seed", request.seed, 0, 2**63 - 1)
    last = target.vocab_size - 1
    bad = next((token for token in request.prompt if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prompt has token {bad}, allowed are 0 to {last}")
    if len(request.prediction) > most:
        raise UserError(f"the prediction has {len(request.prediction)} tokens, the target's context holds {most}")
    bad = next((token for token in request.prediction if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prediction has token {bad}, allowed are 0 to {last}")
    if request.adjustments is not None:
        check_whole("min_tokens", request.adjustments.min_tokens, 0, request.max_tokens)
        for token, _ in request.adjustments.logit_bias:
            check_whole("a token of logit_bias", token, 0, last)
        _check_allowed(request, request.adjustments, last)


def _check_allowed(request: Request, adjustments: Adjustments, last: int) -> None:
    """The tokens that alone may be written: they are there, and something is left where an answer may not end yet."""
    for token in adjustments.allowed or ():
        check_range("a token of allowed_token_ids", token, 0, last)
    if adjustments.allowed is not None and adjustments.min_tokens and request.stop_ids.issuperset(adjustments.allowed):
        raise UserError("allowed_token_ids has stop tokens alone, which min_tokens forbids: allow others")
