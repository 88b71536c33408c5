"""Rules: how the target's scores judge a tree."""
