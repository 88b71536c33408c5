"""HTTP server with the OpenAI and Anthropic APIs, answered by speculative decoding."""
