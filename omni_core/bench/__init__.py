"""``omni bench``: a load client for any server with OpenAI's videos API. Imports neither vLLM nor torch."""
