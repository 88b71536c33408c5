"""What structured output costs, and what drafting by the grammar gives: SmolLM2 on this machine.

python bench/grammar.py [--tokens 128] [--rounds 3] [--json FILE]

The cost: plain decoding of a text that the grammar allows anyway, against the same text without one. The gain:
documents of a fixed skeleton and forced tool calls, with and without what the grammar forces among the drafts, against
plain decoding. All three write the same text, which is compared. In turn, medians of the rounds, another way first in
each; prefill is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import outpace
from outpace.api.params import SamplingParams
from outpace.tools.call_grammar import structure_of
from outpace.tools.definitions import HERMES, ToolChoice, read_tools

RECORD = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 24},
        "customer_email": {"type": "string", "maxLength": 32},
        "order_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "delivery_status": {"enum": ["pending", "shipped", "delivered"]},
        "is_gift": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country_code": {"enum": ["DE", "FR", "US"]},
            },
            "required": ["street_name", "postal_code", "country_code"],
            "additionalProperties": False,
        },
    },
    "required": ["customer_name", "customer_email", "order_number", "delivery_status", "is_gift", "shipping_address"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_flight_connections",
            "parameters": {
                "type": "object",
                "properties": {
                    "departure_city": {"type": "string", "maxLength": 16},
                    "arrival_city": {"type": "string", "maxLength": 16},
                    "number_of_passengers": {"type": "integer", "minimum": 1, "maximum": 9},
                    "cabin_class": {"enum": ["economy", "business"]},
                },
                "required": ["departure_city", "arrival_city", "number_of_passengers", "cabin_class"],
                "additionalProperties": False,
            },
        },
    }
]
STORY = "Write a long story about a lighthouse keeper."
ORDER = "Ann Miller orders a lamp as a gift. Describe her order."
FLIGHT = "Book a flight from Paris to Rome for two."


def main() -> None:
    """Reads the options, times both parts and prints one line for each, then all as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128, help="of the text by which the cost is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with outpace.load() as llm:
        rows = [cost(llm, asked.tokens, asked.rounds), *gains(llm, asked.rounds)]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows))


def cost(llm: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Plain decoding with and without a grammar that allows the text."""
    free = SamplingParams(max_tokens=tokens, ignore_eos=True)
    limited = SamplingParams(max_tokens=tokens, ignore_eos=True, structured_outputs={"regex": "(.|\n)*"})
    return compare(
        "cost of a grammar",
        llm,
        STORY,
        {"plain": (free, {"plain": True}), "grammar": (limited, {"plain": True})},
        rounds,
    )


def gains(llm: Any, rounds: int) -> list[dict[str, Any]]:
    """Documents and calls: plainly, drafted, drafted by the grammar too."""
    tools = read_tools(TOOLS)
    call = structure_of(llm.tokenizer, HERMES, tools, ToolChoice("required"), parallel=False)
    record = {"json": RECORD, "disable_any_whitespace": True}
    first, *_ = llm.engine.drafting.drafters
    rows = []
    for name, prompt, structure in (("fixed skeleton", ORDER, record), ("tool call", FLIGHT, call)):
        params = SamplingParams(max_tokens=200, structured_outputs=structure)
        ways = {"plain": (params, {"plain": True}), "drafted": (params, {"drafter": first}), "grammar": (params, {})}
        rows.append(compare(name, llm, prompt, ways, rounds))
    return rows


def compare(name: str, llm: Any, prompt: str, ways: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Tokens a second by each way, in turn; what the others write over the first, by the median of the rounds."""
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    texts, lengths = set(), {}
    for number in range(rounds + 1):
        turn = number % len(ways)  # who comes first may find the machine colder
        for way, (params, options) in (*list(ways.items())[turn:], *list(ways.items())[:turn]):
            result = llm.chat(prompt, params, **options)
            texts.add(result.text)
            lengths[way] = round(result.figures.mean_accepted_length, 2)
            if number:  # the first round warms up
                speeds[way].append(result.tokens_per_second)
    base = speeds[next(iter(ways))]
    row: dict[str, Any] = {"what": name, "tokens": len(result.tokens), "equal_text": len(texts) == 1}
    for way, found in speeds.items():
        ratio = statistics.median(speed / plain for speed, plain in zip(found, base, strict=True))
        row |= {f"{way}_tokens_per_second": round(statistics.median(found), 1), f"{way}_ratio": round(ratio, 3)}
        row |= {f"{way}_length": lengths[way]}
    return row


if __name__ == "__main__":
    main()
