"""CARD (query-and-correct, arXiv:2508.04462): a drafter fills a cache of candidates while the target, in parallel,
queries it.

The life of a candidate: the drafter grows its tree by a layer (`loop.DraftLoop.grow`); the worker publishes the layer
(`worker.DraftWorker`), which inserts it into the request's `cache.CandidateCache`; the target queries the cache for the
best subtree, verifies that in one pass, and corrects the cache. The correction moves the root of the cache at once and
travels to the drafter as a message, which re-roots its tree before it grows again. On a hit the candidates below the
new root live on in both trees; on a miss both start from the target's own token.

A worker runs the drafter in a thread (`thread`), in a process (`process`), in the target's thread while a GPU runs the
pass (`polled`), or on a simulated clock (`inline`).
"""
