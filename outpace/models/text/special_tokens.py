"""Texts of tokens with a meaning of their own, by which they are found in vocabularies that do not name them."""

from __future__ import annotations

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
