"""Decoders: coroutines that write an answer by asking the engine to draft, verify and commit."""

from .auto import Auto as Auto
from .autoregressive import Autoregressive as Autoregressive
from .bild import Bild as Bild
from .card import Card as Card
from .pearl import Pearl as Pearl
from .planned import Planned as Planned
from .speculative import Speculative as Speculative
from .ssd import Ssd as Ssd
