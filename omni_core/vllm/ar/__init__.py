"""The autoregressive runtime on vLLM's Model Runner V2."""
