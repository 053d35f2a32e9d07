"""Positions of an image model that are no patches: class, distillation, register and detection tokens.

A family's row in `family.py` says how many there are. Any other model has them as parameters beside its patch
projection; a pass then checks them: positions of the first block = patches + tokens, P + k = T.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_NAMES = re.compile(
    r"^(cls|class|dist|distill|distillation|reg|register|registers|storage|det|detection)_?(tokens?|embeddings?|emb)$"
)
_LAST = re.compile(r"^det")  # detection tokens follow the patches
_PIXELS = 4  # channels of an image at most
CUTTING = (nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class SpecialPositions:
    """How many positions before and after the patches are none; `names` are the parameters that say so."""

    before: int = 0
    after: int = 0
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """All of them."""
        return self.before + self.after


def named_tokens(model: nn.Module, owner: str) -> SpecialPositions | None:
    """The tokens that a model of images puts beside its patches, by the parameters around its patch projection.

    None where it reads no images. A token elsewhere, such as the query of an attention pooling, is no position of the
    blocks.
    """
    root = model.get_submodule(owner)
    if not _reads_images(root):
        return None
    around = _around(root)
    found = {name: p for name, p in root.named_parameters() if _NAMES.match(name.rpartition(".")[2])}
    sizes = {name: int(p.shape[:-1].numel()) for name, p in found.items() if around(name.rpartition(".")[0])}
    after = sum(size for name, size in sizes.items() if _LAST.match(name.rpartition(".")[2]))
    return SpecialPositions(sum(sizes.values()) - after, after, tuple(name.rpartition(".")[2] for name in sizes))


def _reads_images(root: nn.Module) -> bool:
    takes = inspect.signature(root.forward).parameters
    if "pixel_values" in takes or hasattr(root, "config"):
        return "pixel_values" in takes and "input_ids" not in takes
    return any(isinstance(part, nn.Conv2d) for part in root.modules()) and "input_ids" not in takes


def _around(root: nn.Module) -> Any:
    """Whether the module of a path is, or holds, what cuts the image into patches."""
    cuts = (path for path, part in root.named_modules() if isinstance(part, CUTTING) and part.in_channels <= _PIXELS)
    first = next(cuts, None)
    if first is None:  # patches come cut, or unfolded
        return lambda path: not path or "embed" in path
    return lambda path: not path or f"{first}.".startswith(f"{path}.")


def patch_counts(arguments: Mapping[str, Any], config: Any) -> list[int]:
    """The number of patches by the pixels: they come cut into patches, or the configuration has the patch size."""
    pixels, size = arguments.get("pixel_values"), getattr(config, "patch_size", None)
    if isinstance(pixels, Tensor) and pixels.dim() == 3:
        return [int(pixels.shape[1])]
    if isinstance(pixels, Tensor) and pixels.dim() == 4 and isinstance(size, int):
        return [(pixels.shape[2] // size) * (pixels.shape[3] // size)]
    return []


def settle(tokens: SpecialPositions, x: Tensor, patches: Sequence[int]) -> tuple[SpecialPositions, str]:
    """The tokens among the positions of the first block's input x [B, T, d], and a note where they cannot be told.

    Tokens are the same for every image: of several images, the last positions are the tokens where they, and not the
    first ones, are equal in all.
    """
    positions, k = int(x.shape[1]), tokens.count
    fitting = [count for count in patches if 0 < count <= positions]
    if not patches or positions - k in fitting:
        last = len(x) > 1 and tokens.before and not _same(x[:, : tokens.before]) and _same(x[:, -k:])
        return (SpecialPositions(0, k, tokens.names) if last else tokens), ""
    if not k and (positions in fitting or not fitting):
        return SpecialPositions(), ""  # every position is a patch, or patches were merged
    if positions in fitting:
        note = f"{', '.join(tokens.names)} is at no position of the first block: all positions are patches"
        return SpecialPositions(), note
    told = f"{positions} positions where the image has {(fitting or list(patches))[-1]} patches"
    what = f"which its {k} tokens ({', '.join(tokens.names)}) do not explain"
    what = what if k else "and no parameter says what the others are"
    return SpecialPositions(), (
        f"the first block reads {told}, {what}: all positions are counted, and none as a class token"
    )


def _same(x: Tensor) -> bool:
    return bool((x == x[:1]).all())
