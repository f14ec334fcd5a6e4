"""Run as a program (``python -m omni_core.vllm.probe``): print the device type of the platform that vLLM picks here."""

from __future__ import annotations


def main() -> None:
    """Print ``device_type=...`` as the last line; it is empty where vLLM finds no platform."""
    from vllm.platforms import current_platform

    print(f"device_type={current_platform.device_type or ''}")


if __name__ == "__main__":
    main()
