"""The server: the OpenAI and Anthropic APIs over HTTP, answered with speculation."""
