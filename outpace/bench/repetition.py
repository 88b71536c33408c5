"""Three tasks whose answers repeat their prompts: files edited by instruction, code refactored, questions on a text."""

from __future__ import annotations

SETTINGS = """\
# Settings of the weather station on the roof.
[station]
name = "north roof"
latitude = 53.55
longitude = 9.99
height_in_metres = 21
time_zone = "Europe/Berlin"

[sensors]
temperature = { port = 1, every_seconds = 60, unit = "celsius" }
humidity = { port = 2, every_seconds = 60, unit = "percent" }
pressure = { port = 3, every_seconds = 120, unit = "hectopascal" }
wind_speed = { port = 4, every_seconds = 10, unit = "metres per second" }
wind_direction = { port = 5, every_seconds = 10, unit = "degrees" }
rain = { port = 6, every_seconds = 300, unit = "millimetres" }

[storage]
folder = "/var/lib/station"
keep_days = 90
compress = true
file_name = "readings-%Y-%m-%d.csv"

[alarm]
address = "caretaker@example.org"
wind_speed_above = 20
temperature_below = -10
repeat_after_minutes = 30
"""
GUIDE = """\
# How to borrow a cargo bike

The club has four cargo bikes: Anna, Bruno, Clara and Dario. Every member may borrow one for up to three days.

## Before you ride

1. Book the bike in the calendar, at least one day before you need it.
2. Fetch the key from the box beside the door of the workshop. The code of the box is sent to you on the day.
3. Look at the tyres, the brakes and the lights. Do not ride a bike that has a fault: write to the workshop instead.

## While you have it

- Lock the bike to something firm, with the chain and the frame lock.
- Do not carry more than 80 kilograms in the box.
- Children sit in the box with their belts closed.
- Anna and Bruno have a motor: charge the battery every night.

## When you bring it back

1. Put the bike back to its place in the yard and lock it.
2. Put the key back into the box beside the door of the workshop.
3. Charge the battery of Anna or Bruno.
4. Write into the calendar what was wrong, if anything was wrong.

Questions? Write to the workshop: workshop@example.org.
"""
SHOP = """\
class Shop:
    def __init__(self):
        self.items = {}
        self.orders = []

    def add(self, name, price, count):
        if price < 0:
            print("wrong price")
            return
        if count < 0:
            print("wrong count")
            return
        self.items[name] = [price, count]

    def price(self, name):
        return self.items[name][0]

    def count(self, name):
        return self.items[name][1]

    def sell(self, name, count, customer):
        if name not in self.items:
            print("no such item")
            return
        if self.items[name][1] < count:
            print("not enough")
            return
        self.items[name][1] = self.items[name][1] - count
        total = self.items[name][0] * count
        self.orders.append([customer, name, count, total])
        return total

    def total(self, customer):
        result = 0
        for order in self.orders:
            if order[0] == customer:
                result = result + order[3]
        return result
"""
READINGS = """\
import csv


def read(path):
    rows = []
    file = open(path)
    reader = csv.reader(file)
    for row in reader:
        rows.append(row)
    file.close()
    return rows


def mean(rows, column):
    total = 0
    count = 0
    for row in rows:
        total = total + float(row[column])
        count = count + 1
    return total / count


def highest(rows, column):
    best = float(rows[0][column])
    for row in rows:
        if float(row[column]) > best:
            best = float(row[column])
    return best


def lowest(rows, column):
    best = float(rows[0][column])
    for row in rows:
        if float(row[column]) < best:
            best = float(row[column])
    return best


def report(path):
    rows = read(path)
    print("mean", mean(rows, 1))
    print("highest", highest(rows, 1))
    print("lowest", lowest(rows, 1))
"""
LIGHTHOUSE = """\
The lighthouse of Sandholm stands on the western end of the island, on a rock that the sea surrounds at high tide. \
It was built between 1871 and 1874 by the engineer Hedvig Lund, after three ships had been lost on the reef within \
one winter. The tower is 34 metres high and has 178 steps. Its walls are two metres thick at the foot and 60 \
centimetres at the top. The granite came by barge from a quarry on the mainland; each block was numbered there and \
put together like a puzzle on the rock.

The first lamp burned colza oil and was turned by a clockwork that had to be wound every four hours. In 1906 the oil \
was replaced by petroleum vapour, and in 1938 by electricity, which a cable brings from the village. The lens was \
made in Paris in 1873. It weighs two tonnes and floats in a bath of mercury, so that a child could turn it with one \
finger. The light flashes twice every fifteen seconds and can be seen from 22 nautical miles away.

Three keepers and their families lived in the house beside the tower until 1982. They grew potatoes and cabbage in a \
walled garden and kept goats. A teacher came from the village twice a week when the sea allowed it. The longest time \
that the rock was cut off was 41 days, in the winter of 1929, when the keepers ate the last goat and burned the \
furniture of the school room. Since 1982 the light has been automatic; a technician visits it four times a year.

In 1995 the county wanted to sell the house to a hotel company. The people of the village founded a society, \
collected signatures and bought it themselves for one crown and the promise to repair the roof. Today the house has \
a small museum, six beds for guests and a station where students of biology count seabirds. In spring about 4000 \
pairs of guillemots breed on the cliffs below. The museum is open from May to September, on every day but Monday, \
from ten to four. The way across the sand can be walked for two hours before and after low tide; a board at the pier \
shows the times.
"""
BREAD = """\
Rye bread with sourdough takes two days, but little work. On the evening of the first day, mix 50 grams of starter \
with 250 grams of rye flour and 300 grams of warm water, cover the bowl with a cloth, and leave it in a warm place \
for 12 to 16 hours. The dough should smell sour and have small bubbles. Take 50 grams of it away and put them in the \
fridge: this is the starter of your next bread. It keeps for two weeks; after that, feed it with a spoonful of flour \
and a spoonful of water.

On the second day, add 300 grams of rye flour, 150 grams of wheat flour, 12 grams of salt and 250 grams of warm \
water to the bowl. Seeds or nuts may be added now, up to 150 grams of them, if they were soaked overnight. Mix \
everything with a wooden spoon for five minutes. The dough is wet and cannot be kneaded by hand; this is as it \
should be. Leave it in the bowl for one hour.

Grease a tin of two litres and strew it with flour or bran. Fill in the dough with wet hands and smooth the top. \
Cover it and let it rise for two to three hours, until it has grown by a half and the surface shows the first fine \
cracks. If the room is cold, put the tin in the oven with nothing but the lamp switched on.

Heat the oven to 240 degrees. Put the tin on the lowest rack and pour a cup of water on the hot tray below it, so \
that steam rises. After ten minutes turn the heat down to 190 degrees and bake the bread for another 55 minutes. It \
is done when it sounds hollow if you knock on its bottom, or when a thermometer shows 97 degrees in the middle. Take \
it out of the tin at once and let it cool on a grid. Do not cut it before the next morning: a rye bread that is cut \
warm sticks to the knife. In a cloth or a wooden box it stays fresh for a week, and it is at its best on the third \
day.
"""

_EDITS = {
    SETTINGS: (
        "Change the name of the station to south tower and its height to 34 metres.",
        "Make every sensor that is read every 60 seconds be read every 30 seconds.",
        "Remove the rain sensor and keep the readings for 365 days.",
        "Add a sensor for sunshine on port 7 that is read every 120 seconds, in minutes.",
        "Change the address of the alarm to roof@example.org and repeat it after 60 minutes.",
    ),
    GUIDE: (
        "Bruno was sold: write the guide for the three bikes that are left.",
        "Members may now borrow a bike for up to five days and carry up to 100 kilograms.",
        "Replace the calendar by the app everywhere.",
        "Add a last section on what a lost key costs: 20 euros.",
        "Correct the guide so that it says helmets are to be worn, in the section on riding.",
    ),
}
_REFACTORINGS = {
    SHOP: (
        "Add type hints to every method.",
        "Raise ValueError instead of printing a message.",
        "Rename the method sell to order and the method total to spent.",
        "Use a dataclass Item with price and count instead of the list.",
        "Add a docstring to the class and to every method.",
    ),
    READINGS: (
        "Add type hints and a docstring to every function.",
        "Use with to open the file, and max, min and sum instead of loops.",
        "Rename the argument rows to readings everywhere.",
        "Let every function take the name of the column instead of its number, with csv.DictReader.",
        "Return the report as a text instead of printing it.",
    ),
}
_QUESTIONS = {
    LIGHTHOUSE: (
        "Quote every sentence that gives a number of years, metres or steps of the tower.",
        "How was the light made to burn and turn from the beginning until today? Answer with sentences of the text.",
        "What happened in the winter of 1929? Quote the text.",
        "Who lives or works at the lighthouse now, and when may it be visited? Quote the text.",
        "Summarise each paragraph in one sentence, with the words of the text.",
    ),
    BREAD: (
        "List all ingredients with their amounts, in the words of the text.",
        "What has to be done on the second day? Quote the steps in their order.",
        "How is the bread baked, and how does one know that it is done? Quote the text.",
        "How long do the starter and the bread keep? Quote the sentences that say so.",
        "Write the recipe as numbered steps, and keep the words of the text.",
    ),
}

TASKS: dict[str, tuple[str, ...]] = {
    "edit": tuple(
        f"Here is a file:\n\n```\n{file}```\n\n{wish} Answer with the whole file, otherwise unchanged."
        for file, wishes in _EDITS.items()
        for wish in wishes
    ),
    "refactor": tuple(
        f"Here is a Python module:\n\n```python\n{module}```\n\n{wish} Answer with the whole module."
        for module, wishes in _REFACTORINGS.items()
        for wish in wishes
    ),
    "document": tuple(
        f"Read this text:\n\n{document}\n{question}"
        for document, questions in _QUESTIONS.items()
        for question in questions
    ),
}
