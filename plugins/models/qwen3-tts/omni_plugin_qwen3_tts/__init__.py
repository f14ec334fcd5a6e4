"""Qwen3-TTS for Omni."""
