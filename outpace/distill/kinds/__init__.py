"""The kinds of draft that can be trained."""

from __future__ import annotations

from outpace.distill.kinds.dspark import DSparkStudent
from outpace.distill.kinds.eagle3 import Eagle3Student
from outpace.distill.kinds.specformer import SpecFormerStudent
from outpace.distill.kinds.steered import SteeredStudent
from outpace.distill.student import Student

KINDS: dict[str, type[Student]] = {
    "standalone": Student,
    "eagle3": Eagle3Student,
    "dspark": DSparkStudent,
    "specformer": SpecFormerStudent,
    "steered": SteeredStudent,
}
