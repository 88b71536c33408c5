"""A few prompts of our own, for a bench without files: answers that repeat the prompt, and answers that do not."""

from __future__ import annotations

LETTER = (
    "Dear Ms Okafor, thank you for your order of 12 June. The blue kettle is out of stock until 3 July. We can send "
    "the green kettle this week, at the same price, or keep your order open until the blue kettle is here. Please tell "
    "us which you prefer. Kind regards, Amira Haddad, Harbour Street Kitchens"
)
TABLE = (
    "Lisbon, 545000 people, river Tagus; Vienna, 1980000 people, river Danube; Cairo, 10100000 people, river Nile; "
    "Prague, 1360000 people, river Vltava; Baghdad, 7700000 people, river Tigris"
)
FUNCTION = (
    "def total(prices, tax):\n    result = 0\n    for price in prices:\n        result = result + price\n"
    "    result = result + result * tax\n    return result\n"
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "rewriting": (
        f"Copy this letter, but change the kettle to a lamp:\n\n{LETTER}",
        f"Write these lines as a table with the columns city, people and river:\n\n{TABLE}",
        f"Add type hints and a docstring to this function, and change nothing else:\n\n{FUNCTION}",
    ),
    "code": (
        "Write a Python function that returns the longest word of a sentence, with a docstring and an example.",
        "Write a Python class Stack with push, pop, peek and is_empty.",
        "Write a SQL query that lists the ten customers who spent most in 2024, with the sum that each spent.",
    ),
    "maths": (
        "A baker makes 240 rolls a day, sells two thirds of them before noon and half of the rest after noon. How many "
        "are left? Think step by step.",
        "A train leaves at 9:40 and travels 150 km at 60 km an hour. When does it arrive? Explain each step.",
        "A rectangle is three times as long as it is wide and has a perimeter of 64 cm. What is its area?",
    ),
    "writing": (
        "Tell a short story about a child who finds an old map in the attic.",
        "Explain to somebody who has never seen the sea what a tide is.",
        "Give five reasons why a small town should keep its library, with a sentence on each.",
    ),
}
