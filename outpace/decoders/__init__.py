"""Decoders: coroutines that write an answer by asking the engine to draft, verify and commit."""

from outpace.decoders.auto import Auto as Auto
from outpace.decoders.autoregressive import Autoregressive as Autoregressive
from outpace.decoders.bild import Bild as Bild
from outpace.decoders.card import Card as Card
from outpace.decoders.pearl import Pearl as Pearl
from outpace.decoders.planned import Planned as Planned
from outpace.decoders.speculative import Speculative as Speculative
from outpace.decoders.ssd import Ssd as Ssd
