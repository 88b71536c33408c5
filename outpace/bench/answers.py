"""Questions of our own with known answers, easy enough for a model of 135 million weights to know some and not all."""

from __future__ import annotations

_SENTENCES = (
    "The train leaves at nine.",
    "My sister has a red bicycle.",
    "We eat soup on Sundays.",
    "Please close the green door.",
    "He paid twelve dollars for it.",
    "The lake is cold in March.",
    "She wrote a letter to Omar.",
    "Two boats left the harbour.",
    "Rain fell all night long.",
    "Nobody knew the old song.",
    "The baker opens at six.",
    "Our teacher lives near the river.",
)
_CAPITALS = (  # country, choices, the right one
    ("France", ("Lyon", "Paris", "Nice"), "Paris"),
    ("Italy", ("Milan", "Naples", "Rome"), "Rome"),
    ("Canada", ("Toronto", "Ottawa", "Montreal"), "Ottawa"),
    ("Australia", ("Canberra", "Sydney", "Perth"), "Canberra"),
    ("Turkey", ("Istanbul", "Ankara", "Izmir"), "Ankara"),
    ("Brazil", ("Rio de Janeiro", "Salvador", "Brasilia"), "Brasilia"),
    ("Egypt", ("Cairo", "Luxor", "Aswan"), "Cairo"),
    ("Morocco", ("Casablanca", "Fez", "Rabat"), "Rabat"),
    ("Switzerland", ("Zurich", "Bern", "Geneva"), "Bern"),
    ("Japan", ("Osaka", "Kyoto", "Tokyo"), "Tokyo"),
    ("Vietnam", ("Hanoi", "Hue", "Da Nang"), "Hanoi"),
    ("India", ("Mumbai", "New Delhi", "Chennai"), "New Delhi"),
)
_NUMBERS = (
    ("The tower was built in 1911 and repaired in 1987. When was the tower built?", "1911"),
    ("The bridge was opened in 1894. When was the bridge opened?", "1894"),
    ("Maria was born in 1962 and moved to Porto in 1990. When was Maria born?", "1962"),
    ("The river is 340 kilometres long. How long is the river?", "340"),
    ("The book has 212 pages. How many pages does the book have?", "212"),
    ("The old mill was sold in 1923 for 4000 crowns. When was the old mill sold?", "1923"),
    ("The school has 410 pupils. How many pupils does the school have?", "410"),
    ("The hill is 86 metres high and lies 12 kilometres from the sea. How high is the hill?", "86"),
    ("The shop opened in 2004 with 3 workers. In which year did the shop open?", "2004"),
    ("The match lasted 95 minutes. How many minutes did the match last?", "95"),
    ("The painter died in 1778, when he was 61. In which year did the painter die?", "1778"),
    ("The village has 730 inhabitants and 2 churches. How many inhabitants does the village have?", "730"),
)

TASKS: dict[str, tuple[dict[str, object], ...]] = {  # as lines of a task file have them
    "sentences": tuple(
        {"turns": [f"Repeat this sentence exactly and write nothing else: {sentence}"], "reference": sentence}
        for sentence in _SENTENCES
    ),
    "capitals": tuple(
        {
            "turns": [f"Which city is the capital of {country}: {first}, {second} or {third}?"],
            "choices": [first, second, third],
            "reference": capital,
        }
        for country, (first, second, third), capital in _CAPITALS
    ),
    "numbers": tuple({"turns": [question], "reference": number} for question, number in _NUMBERS),
}
