"""What vLLM's own ``vllm`` command calls when ``--omni`` is among its arguments."""

from omni_core.cli.shim import main

__all__ = ["main"]
