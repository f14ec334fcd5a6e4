"""``python -m omni_core.vllm.contact``: has the installed vLLM every symbol that the core touches?"""

from __future__ import annotations

import sys
from pathlib import Path

import omni_core
from omni_core.contact import missing_symbols, vllm_contacts


def main() -> int:
    """Print one line; 1 if a symbol is missing."""
    contacts = vllm_contacts(Path(omni_core.__file__).parent)
    missing = missing_symbols(contacts)
    print(f"this vLLM lacks {', '.join(missing)}" if missing else f"all {len(contacts)} symbols that the core touches")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
