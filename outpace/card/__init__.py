"""CARD's shared cache, and where the drafter that fills it runs: on a simulated clock, in a thread, or in a process."""
