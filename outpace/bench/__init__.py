"""What every method and every other engine gives on the same prompts, measured side by side."""
