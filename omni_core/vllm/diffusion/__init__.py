"""Diffusion inside stock vLLM's engine: an own request scheduler and an own model runner, everything else stock."""
