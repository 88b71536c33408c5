"""Tools and reasoning: offered in a prompt, forced by a grammar, found again in the text as it comes."""
