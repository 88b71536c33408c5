"""Texts to be summarised, each asked for in two ways."""

from __future__ import annotations

_TEXTS = (
    """\
The tram line to the harbour was opened in 1911 and closed in 1969, when most people of the town had bought cars. \
Its rails stayed in the street under a thin layer of asphalt. Last spring the council decided to uncover them. A \
study had shown that 9000 people travel to the harbour on a working day, that two thirds of them come by car, and \
that the parking spaces take more room than all the shops together. The new line will be 6.4 kilometres long and \
have eleven stops. Trams are to run every eight minutes from five in the morning to midnight. The shopkeepers of \
Long Street fear the two years of building; the council has promised them half of the rent that they lose. The first \
tram is to leave on the first of May in three years.
""",
    """\
Octopuses taste with their arms. Each of the eight arms has some two hundred suckers, and the rim of every sucker \
carries thousands of cells that tell what they touch. Two thirds of the animal's nerve cells are in the arms, so \
that an arm can search a crack in the rock by itself while the eyes watch for danger. Biologists who removed the \
signal from the brain found that an arm still grasped a crab and passed it on from sucker to sucker towards the \
mouth. It let go of pieces that tasted bitter. What the brain learns of all this is not known. Some think that it \
gives orders such as search or come back, and that the arms see to the rest.
""",
    """\
From: Mirela. To: all of the second floor. As you will have noticed, the heating on our side failed again on Monday. \
The landlord sent a technician on Tuesday, who replaced a pump, and on Wednesday another one, who found that the \
pump had not been the fault: a valve in the cellar was stuck. A new valve has been ordered and will be fitted next \
Thursday between eight and noon. Until then the radiators on the north side will stay cold in the mornings. There \
are six electric heaters in the storage room; please take only one for each room and switch it off when you leave, \
because two on one socket blow the fuse. Who would rather work from home until Thursday may do so and need not ask. \
The meeting on Wednesday moves to the library on the first floor, which is warm.
""",
    """\
For a long time glass was made by blowing. To get a pane, a bubble was blown into a cylinder, cut open and laid \
flat, and such panes were small, uneven and expensive. In 1952 Alastair Pilkington had the idea to pour the melt on \
a bath of liquid tin. Tin is heavier than glass and perfectly level, so the glass floats on it, spreads by its own \
weight to the same thickness everywhere and cools to a sheet whose two faces need no polishing. It took seven years \
and several million pounds until the first pane could be sold; for fourteen months the plant made nothing that was \
good enough. Today nine tenths of all flat glass are made in this way. A line works day and night for ten to fifteen \
years, for starting it takes weeks.
""",
    """\
The library of seeds in the hills above the town keeps 14000 kinds of beans, grains and vegetables. Most of them are \
no longer grown anywhere. Farmers bring a handful and may take three handfuls of another kind; every fifth year each \
kind must be sown, because seeds do not keep for ever, and this is the work of forty volunteers. In the dry summer \
two years ago most of the valley's maize failed. An old kind with short stems, which a widow had given to the \
library in 1987 because nobody wanted it, stood the drought and gave two thirds of a usual harvest. Since then \
nineteen farms have asked for it. The library has no money to pay anybody. It lives from an annual market, on which \
visitors buy tomatoes that they have never seen.
""",
)
_WISHES = ("Summarise this text in two sentences:", "List the main points of this text, one in each line:")

TASKS: dict[str, tuple[str, ...]] = {"summary": tuple(f"{wish}\n\n{text}" for text in _TEXTS for wish in _WISHES)}
