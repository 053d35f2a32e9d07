"""Declare a metric of your own; it can be called on arrays, and measured in every layer of a model.

python examples/add_a_metric.py
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import GPT2Config, GPT2Model

import anisoscope
from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.metric import metric
from anisoscope.stats.moments import Moments


@metric(
    Moments,  # the statistic it reads: n, mean and scatter of the rows
    title="Condition number",
    formula="σ₁ / σ_d",
    reference="Golub & Van Loan",
    convention="rows centred on their mean",
    invariant=("rotation", "scale", "shift"),
    bounds=(1.0, None),
)
def condition_number(moments: Moments, *, centred: bool = True) -> float:
    """How much longer the longest direction is than the shortest."""
    if moments.n <= moments.width:
        raise TooFewRows(f"a condition number needs more than {moments.width} rows, seen {moments.n}; give more")
    energies = moments.eigenvalues(centred=centred)
    return float((energies[0] / energies[-1]).sqrt())


print("planted 10:", condition_number(np.random.default_rng(0).normal(size=(5000, 4)) * [10, 3, 2, 1]))

torch.manual_seed(0)
model = GPT2Model(GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=200, bos_token_id=1, eos_token_id=2))
table = anisoscope.measure(model, [torch.randint(0, 200, (8, 64))], metrics=["condition_number"], sites=["resid"])
for row in table.records():
    print(f"block {row['layer']}: {row['value']:.1f} [{row['low']:.1f}, {row['high']:.1f}]")
