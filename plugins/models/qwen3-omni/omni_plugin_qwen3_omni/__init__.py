"""Qwen3-Omni for Omni."""
