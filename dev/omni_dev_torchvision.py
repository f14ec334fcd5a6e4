"""Lets a torchvision wheel that is a CUDA build be imported beside a CPU build of torch; for development only.

torchvision's Python files describe two compiled operators which its own library cannot register without CUDA. They are
declared here, without an implementation, right before torchvision is first imported, and only where torch is a CPU
build and torchvision's library does not load. A process that never imports torchvision is left alone.
"""

import sys

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_keep = []  # a Library that is collected takes its operators with it


class _DeclareOperators:
    """A finder that finds nothing: it only learns that torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_if_needed()
        return None


def _declare_if_needed():
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    import torch

    if torch.version.cuda or torch.version.hip or _loads(torch, Path(found.origin).parent.glob("_C*.so")):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator)
    _keep.append(library)


def _loads(torch, files):
    """Whether torchvision's library can register its operators itself."""
    for file in files:
        try:
            torch.ops.load_library(str(file))
        except OSError:
            continue
        return True
    return False


# The ``.pth`` file beside this module imports it at every start of the interpreter, in a virtual environment even
# twice; a module's body runs once.
sys.meta_path.insert(0, _DeclareOperators())
