"""Lets the torchvision wheel, a CUDA build, import beside a CPU build of torch; part of the development set-up.

torchvision's Python files describe two compiled operators that its library cannot register without CUDA. They are
declared here, with no implementation, right before torchvision is first imported; nothing happens where it never is.
"""

import sys
from importlib.abc import MetaPathFinder

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_keep = []


class _DeclareOperators(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not _keep:
                library = torch.library.Library("torchvision", "DEF")
                for operator in _OPERATORS:
                    library.define(operator)
                _keep.append(library)
        return None


def install():
    """Called from the ``.pth`` file beside this module at every start of the interpreter."""
    sys.meta_path.insert(0, _DeclareOperators())
