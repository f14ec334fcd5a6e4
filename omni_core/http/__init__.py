"""HTTP routes on top of vLLM's own app. Nothing here imports vLLM."""
