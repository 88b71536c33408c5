"""The constants of keyed noise, for `noise.py` and its Triton kernel."""

from __future__ import annotations

SQRT_HALF_BITS = 0x3F3504F3  # the float32 nearest to sqrt(1/2)
LOG_2 = 0.6931471805599453
UNIT = 2.0**-31 * (1 - 2.0**-23)  # keeps the largest 31-bit integer, rounded to float32, below 1
FACTORS = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E485565 - (1 << 32)  # of the hash's three rounds, with a sign
