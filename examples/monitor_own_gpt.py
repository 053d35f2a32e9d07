"""A GPT written by hand, with a loop written by hand: `Monitor(model)` finds its blocks and its loss by itself.

python examples/monitor_own_gpt.py
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from anisoscope import Monitor, log_spaced
from anisoscope.data.text import read_documents

STEPS, LENGTH, WIDTH, HEADS, LAYERS = 48, 48, 64, 4, 3


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class GPT(nn.Module):
    """Returns logits and, with targets, the mean cross-entropy."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.places.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


# characters of the corpus that ships with the package: inputs, and the same moved by one as targets
text = "".join(document.text for document in islice(read_documents(None), 12))
alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
ids = torch.tensor([alphabet[character] for character in text])
contexts = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
train, held_out = contexts[:-64], contexts[-64:]
counts = torch.bincount(train.flatten(), minlength=len(alphabet))  # did it learn more than how often tokens occur?

torch.manual_seed(0)
model = GPT(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
probe = (held_out[:, :-1], held_out[:, 1:])

with Monitor(model, when=log_spaced(STEPS), metrics="light", probe=probe, counts=counts, rank=8) as monitor:
    for step in range(STEPS):
        with monitor.step(step):
            for part in train[torch.randint(len(train), (32,))].chunk(2):  # two micro-batches
                _, loss = model(part[:, :-1], part[:, 1:])
                assert loss is not None
                (loss / 2).backward()
        monitor.log(step, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with monitor.step(STEPS):  # the state after the last update
        pass

found = monitor.table.where(metric="gradient_enrichment", proxy="semi_nmf", fit="refit", control=None, group="")
print("how many times chance 8 directions fitted on activations hold of the gradients' energy, after each block")
for step in sorted(set(found.unique("step"))):
    here = found.where(step=step, kind="resid", average=None, coordinates=None)
    print(f"step {step:3d}: " + "  ".join(f"{row['value']:5.2f}" for row in here.records()))
print(f"held-out loss {monitor.table.value(metric='probe_loss', step=STEPS):.2f} nats per character")
