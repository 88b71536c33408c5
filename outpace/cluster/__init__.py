"""Drafting for targets on other machines: the draft worker, and clients of a server that draft for themselves."""
