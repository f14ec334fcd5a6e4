"""``python -m omni_core.vllm.probe``: what vLLM runs on here, and whether it has every symbol that Omni touches."""

from __future__ import annotations

import json
from pathlib import Path

import omni_core
from omni_core.contact import missing_symbols, vllm_contacts


def main() -> None:
    """Print one line of JSON: ``device_type`` (empty where vLLM finds no platform), ``symbols``, ``missing``."""
    from vllm.platforms import current_platform

    contacts = vllm_contacts(Path(omni_core.__file__).parent)
    answer = {
        "device_type": current_platform.device_type or "",
        "symbols": len(contacts),
        "missing": missing_symbols(contacts),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
