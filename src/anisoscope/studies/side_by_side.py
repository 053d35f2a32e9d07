"""How many arms of a study a GPU holds at the same time, from an estimate of the memory of each.

Arms side by side fill the gaps that one leaves: a measured step keeps the host busy while another arm trains. Each is a
process of its own with its own memory, and what it computes does not depend on the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

from anisoscope.models.placement import choose_device
from anisoscope.results.folder import RunFolder
from anisoscope.studies.config import PROBED, StudyArm
from anisoscope.tangent.tangent_study import TOGETHER

_CONTEXT = 2 << 30  # bytes of a process: CUDA itself, libraries, what the allocator keeps
_STATE = 16  # bytes for each parameter: weight, gradient and two moments in float32
_ACTIVATION = 96  # bytes for each position, layer and unit of width that a backward pass needs, without fusion
_LOGIT = 12  # bytes for each logit: in bfloat16 and float32, and the gradient
_ROW = 6  # bytes for each number of the probe's rows, of which half have gradients
_WORK = 8  # bytes that the analysis needs beside each byte of the rows that it looks at together
_SHARE = 0.85  # of the free memory


def jobs_that_fit(arms: Sequence[StudyArm]) -> int | None:
    """The number of arms to train at the same time on a GPU, 1 or more; None if they do not train on one."""
    left = [arm for arm in arms if RunFolder(arm.path).about().get("status") != "complete"]
    devices = {choose_device(arm.training.device) for arm in left}
    if not left or any(device.type != "cuda" for device in devices):
        return None
    free = sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    return fitting([memory_of(arm) for arm in left], free, cores=os.cpu_count() or 1)


def fitting(needed: Sequence[int], free: int, *, cores: int) -> int:
    """How many at a time fit, whichever they are: at least one, no more than there are cores to drive them.

    >>> fitting([10, 30, 20, 5], 70, cores=16), fitting([10, 30, 20, 5], 7, cores=16), fitting([1, 1, 1], 70, cores=2)
    (2, 1, 2)
    """
    largest = sorted(needed, reverse=True)
    number = sum(sum(largest[:count]) <= _SHARE * free for count in range(1, len(largest) + 1))
    return max(1, min(number, cores))


def memory_of(arm: StudyArm) -> int:
    """The bytes of device memory that an arm takes at its peak, estimated from its sizes."""
    training, contexts = arm.training, int(arm.watch.get("contexts", 0))
    vocabulary, width, layers = _vocabulary(arm), training.width, training.layers
    parameters = 12 * layers * width**2 + 2 * vocabulary * width
    learned, probed = training.batch_size * training.positions, min(contexts, PROBED["cuda"]) * training.positions
    passes = max(learned, probed) * (_ACTIVATION * layers * width + _LOGIT * vocabulary)
    rows = contexts * training.positions * width * (layers + 2) * _ROW
    train = _CONTEXT + _STATE * parameters + passes + 2 * rows  # the rows, and a copy on its way to the analysis
    return train + (_CONTEXT + rows + _WORK * min(rows, TOGETHER) if contexts else 0)


def _vocabulary(arm: StudyArm) -> int:
    """The tokens of the prepared text of an arm; 0 for other data."""
    try:
        about = json.loads((arm.corpus / "corpus.json").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(about.get("vocab_size", 0))
