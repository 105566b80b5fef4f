"""The HTTP server: OpenAI's endpoints, and what they share."""
