"""Every vLLM import of the core is in this package; ``docs/vllm-contact.md`` lists what it touches."""
