"""The mistakes that mutations.py puts into the kernels, by what they concern."""

from __future__ import annotations

from arithmetic_mistakes import ARITHMETIC
from expert_mistakes import EXPERTS
from pass_mistakes import PASSES
from recurrent_mistakes import RECURRENT

MUTATIONS = (*ARITHMETIC, *PASSES, *RECURRENT, *EXPERTS)
