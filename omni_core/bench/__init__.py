"""``omni bench``: load clients for any server with OpenAI's videos or speech API. Imports neither vLLM nor torch."""
