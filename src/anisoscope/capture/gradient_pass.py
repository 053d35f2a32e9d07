"""Activations and gradients of the summed loss for the same rows, from a forward and backward pass run here.

The pass changes nothing: training modes and random states are restored, and `.grad` is not touched. A gradient of a
*mean* loss depends on the batching, so gradients are always of the sum over target tokens; token and target token of
every row are read from the labels and checked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from anisoscope.capture.capture import Capture
from anisoscope.capture.objective import CLOSE, ContextObjective, hidden_positions, moved_by_one, one_by_one
from anisoscope.capture.objective import IGNORED as IGNORED
from anisoscope.capture.objective import output_part as output_part
from anisoscope.capture.row import Index, KeptRows, PositionChoice, Rows, Rule, Scores, Sink
from anisoscope.capture.sites.layout import Layout
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import evaluating, forward, uncompiled, unwrapped
from anisoscope.models.parallel import piece_of, plain, shard_again, sharded, together, without_gradients

_BEFORE = 2  # tokens before the patches at most: of the class, and one that distils
_PROBES: list[tuple[nn.Module, list[int]]] = []  # passes in progress: their models, and the GPUs that these are on
ContextLosses = tuple[Tensor, Tensor]  # summed loss and number of targets of every context, each [B]
LossRule = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""(model, inputs) -> the summed loss, as a scalar with its graph; an `Objective` is one that also counts its units."""


@dataclass(frozen=True)
class LabelConvention:
    """How a model reads its labels: shifted (position t predicts label t+1), or in place.

    Labels in place may be the next tokens themselves (`ahead`), moved by whoever made the batch.
    """

    shifted: bool
    ahead: bool = False

    def targets(self, labels: Tensor) -> Tensor:
        """The target of every position [B, T]; IGNORED where it has none."""
        if not self.shifted or labels.dim() != 2:  # one label per context cannot be shifted
            return labels
        return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def count(self, labels: Tensor) -> int:
        """The number of target tokens."""
        return int((self.targets(labels) != IGNORED).sum())

    def by_context(self, logits: Any, labels: Any) -> ContextLosses | None:
        """The summed cross-entropy and the number of targets of every context; None where shapes do not fit."""
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
            return None
        targets = self.targets(labels).to(logits.device)
        if logits.shape[:-1] != targets.shape:
            return None
        # one context at a time: the logits of a large vocabulary are not copied as a whole
        pairs = zip(logits.detach(), targets, strict=True)
        flat = ((row.float().reshape(-1, row.shape[-1]), target.reshape(-1)) for row, target in pairs)
        sums = [torch.nn.functional.cross_entropy(*pair, ignore_index=IGNORED, reduction="sum") for pair in flat]
        counts = (targets != IGNORED).reshape(len(targets), -1).sum(1)
        return torch.stack(sums).double().cpu(), counts.cpu()

    def summed(self, logits: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """The cross-entropy of all targets, in the precision of the logits; `weights` [V] are those of the targets."""
        targets = self.targets(labels).to(logits.device).flatten()
        flat = logits.reshape(-1, logits.shape[-1])
        weight = None if weights is None else weights.to(flat)
        return torch.nn.functional.cross_entropy(flat, targets, weight, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class TargetWeights:
    """The weight of every token as a target of the training loss, and whether gradients are those of that loss.

    Gradients of the loss in which every target counts alike are the same measurement for every model, however it was
    trained; those of the weighted loss are the ones that training follows.
    """

    weights: Tensor  # [V]
    gradients: bool = False

    def loss(self, logits: Tensor, labels: Tensor, reading: LabelConvention) -> Tensor:
        """Σ w ℓ over all targets, in float32 or better."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        with contextlib.nullcontext() if self.gradients else torch.no_grad():
            return reading.summed(logits, labels, weights=self.weights).double()


def unlabelled(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a pass without a loss; an encoder-decoder makes its decoder's inputs from the labels."""
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in inputs
    return {name: value for name, value in inputs.items() if name != "labels" or two}


def find_label_convention(model: nn.Module, output: Any, labels: Tensor, ids: Any = None) -> LabelConvention:
    """The label convention under which the mean cross-entropy of the logits equals the model's own loss.

    It is found numerically, not from the class name, because a wrong factor would rescale every gradient.
    """
    loss, logits = output_part(output, "loss"), output_part(output, "logits")
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        raise AnisoscopeError(
            f"{type(model).__name__} returned no loss and logits for its labels; load it with a language-model head "
            "(…ForCausalLM or …ForMaskedLM), or give loss=, a function of (model, inputs) that returns the summed loss."
        )
    if not bool((labels != IGNORED).any()):
        raise AnisoscopeError(
            f"every label is {IGNORED} (ignored), so there is no loss; expected labels at some positions: check the "
            "collator or the masking."
        )
    gaps = {shifted: _gap(LabelConvention(shifted), logits, labels, loss) for shifted in (True, False)}
    best = min(gaps, key=lambda shifted: gaps[shifted])  # at initialisation both losses are near log V
    if gaps[best] <= CLOSE:
        return LabelConvention(best, ahead=not best and moved_by_one(ids, labels))
    raise AnisoscopeError(
        f"the loss of {type(model).__name__} ({float(loss.detach()):.4g}) is not the mean cross-entropy of its logits "
        "and labels, so its scale per token is not known; give loss=, a function of (model, inputs) that returns the "
        "summed loss."
    )


def _gap(reading: LabelConvention, logits: Tensor, labels: Tensor, loss: Tensor) -> float:
    """Relative difference of the model's loss and the mean cross-entropy under one convention."""
    if reading.shifted and labels.dim() != 2:  # one label per context, as of a classifier, is read in place
        return float("inf")
    targets = reading.targets(labels).flatten().to(logits.device)
    if logits.shape[:-1].numel() != targets.numel() or not bool((targets != IGNORED).any()):
        return float("inf")
    flat = logits.detach().float().reshape(-1, logits.shape[-1])
    own = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED)
    return float((own - loss.detach().float()).abs() / own.abs().clamp_min(1e-6))


@dataclass(frozen=True)
class RowTokens:
    """Per row: original token, target token (−1 for none), and whether it was masked."""

    original: Tensor  # [n]
    target: Tensor  # [n]
    masked: Tensor | None  # [n] bool; None where nothing is masked by design

    @staticmethod
    def of(
        index: Index, labels: Tensor | None, reading: LabelConvention | None, *, stack: str, hidden: Any = None
    ) -> RowTokens:
        """Tokens and targets of the rows at `index`; the original token of a masked position is its label.

        `hidden` says which frames or patches the model did not see.
        """
        token, size = index.token.cpu(), (index.batch, index.length)
        nothing = torch.full_like(token, -1)
        fits = labels is not None and reading is not None and labels.shape == size
        if not fits or stack == "encoder":  # rows of an encoder have no targets
            return RowTokens(token, nothing, _hidden_rows(index, hidden))
        assert labels is not None and reading is not None
        target = reading.targets(labels).flatten()[index.keep.cpu()]
        known = target != IGNORED
        target = torch.where(known, target, -1)
        if reading.shifted or reading.ahead or stack == "decoder":
            return RowTokens(token, target, None)
        return RowTokens(torch.where(known, target, token), target, known)


def _hidden_rows(index: Index, hidden: Any) -> Tensor | None:
    """Which rows are of frames or patches that `hidden` marks [B, P]; None where it is of another resolution.

    What stands before the patches, such as a class token, is never hidden.
    """
    before = index.length - hidden.shape[-1] if isinstance(hidden, Tensor) and hidden.dim() == 2 else -1
    if not 0 <= before <= _BEFORE or len(hidden) != index.batch:
        return None
    return torch.nn.functional.pad(hidden.cpu().bool(), (before, 0)).flatten()[index.keep.cpu()]


@dataclass(frozen=True)
class SiteRows:
    """Rows of one site in one pass; `g` is None if no gradients were requested."""

    x: Tensor  # [n, d]
    g: Tensor | None
    index: Index
    tokens: RowTokens

    def of_contexts(self, wanted: Tensor) -> SiteRows:
        """The rows of some contexts of the pass, `wanted` [B] bool, or [B, T] if rows of the batch hold several."""
        index, words = self.index, self.tokens
        chosen = index.among(wanted)
        at, masked = chosen.to(self.x.device), None if words.masked is None else words.masked[chosen]
        tokens = RowTokens(words.original[chosen], words.target[chosen], masked)
        return SiteRows(self.x[at], None if self.g is None else self.g[at], index.taken(chosen), tokens)


@dataclass
class GradientPass:
    """The result of one pass over some contexts."""

    sites: dict[Site, SiteRows] = field(default_factory=dict)
    loss: float = 0.0  # summed over target tokens
    tokens: int = 0
    by_context: ContextLosses | None = None
    weighted_loss: float | None = None  # the same with the weights of the targets; None without weights
    weights: dict[str, Tensor] = field(default_factory=dict)  # gradients by parameter name
    embedded: tuple[Tensor, Tensor] | None = None  # ids [m] and the gradients of their embeddings [m, d]
    unreached: list[Site] = field(default_factory=list)  # sites that no gradient reaches


class Collector(KeptRows):
    """Keeps rows, and activations for their gradients; it forwards everything to `others`."""

    def __init__(self, others: Sink | None = None) -> None:
        super().__init__()
        self.live: dict[Site, tuple[Tensor, Any]] = {}
        # where gradients arrive, also if the activation is overwritten afterwards, and how they are cut into rows: one
        # for each call of the module
        self.edges: dict[Site, list[tuple[Any, Any]]] = {}
        self.others = others

    def rows(self, rows: Rows) -> None:
        super().rows(rows)
        if self.others is not None:
            self.others.rows(rows)

    def scores(self, scores: Scores) -> None:
        if self.others is not None:
            self.others.scores(scores)

    def watch(self, site: Site, activation: Tensor, rows_of: Any) -> None:
        self.live[site] = (activation, rows_of)
        if activation.requires_grad:
            before = self.edges.get(site, []) if site.name else []
            self.edges[site] = [*before, (get_gradient_edge(activation), rows_of)]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, forked random state and the uncompiled forward; everything is restored afterwards.

    Inside another one of the same model only the random state is forked: to look through all modules takes a while.
    """
    outer = next((devices for other, devices in _PROBES if other is model), None)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda}) if outer is None else outer
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        if outer is None:
            stack.enter_context(evaluating(model))
            stack.enter_context(uncompiled(model))
        stack.callback(shard_again, model)
        _PROBES.append((model, devices))
        stack.callback(_PROBES.pop)
        yield


def probing() -> bool:
    """Whether a pass of this module is in progress, which a monitor must not take for training."""
    return bool(_PROBES)


def forward_rows(
    model: nn.Module,
    inputs: Mapping[str, Any],
    sites: Sequence[Site],
    *,
    layout: Layout,
    reading: LabelConvention | None = None,
    others: Sink | None = None,
    extra: Sequence[Site] = (),
    rows: Rule | None = None,
    kept: PositionChoice | None = None,
    call: Callable[[], Any] | None = None,
    notes: list[str] | None = None,
) -> GradientPass:
    """The rows of a forward pass, at positions `kept`; the sink `others` receives them and those of `extra` sites.

    `call` runs the pass if the inputs are not what the model's forward takes.
    """
    collector = Collector(others)
    words: dict[str, Any] = {"layout": layout, "rows": rows, **(kept.options() if kept is not None else {})}
    with untouched(model), Capture(model, [*sites, *extra], collector, **words) as capture:
        if call is None:
            capture.run(unlabelled(model, inputs))
        else:
            with without_gradients(model):
                call()
    if notes is not None:
        notes += [note for note in capture.notes if note not in notes]
    return GradientPass(site_rows(sites, collector.kept, {}, inputs=inputs, reading=reading))


def gradient_rows(
    model: nn.Module,
    inputs: Mapping[str, Any],
    sites: Sequence[Site],
    *,
    layout: Layout,
    reading: LabelConvention | None = None,
    loss: LossRule | None = None,
    targets: TargetWeights | None = None,
    weights: Sequence[str] = (),
    embedding: bool = False,
    others: Sink | None = None,
    extra: Sequence[Site] = (),
    rows: Rule | None = None,
    kept: PositionChoice | None = None,
) -> GradientPass:
    """The rows of a pass with the gradients of the summed loss; optionally also gradients of weights and embeddings.

    With `targets` the loss is also summed with these weights; its gradients are taken if they ask for it.
    """
    out, collector, named = GradientPass(), Collector(others), dict(model.named_parameters())
    embedded: list[tuple[Tensor, Tensor]] = []  # ids and outputs of the input embedding
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.enable_grad())
        if embedding:
            stack.callback(_watch_embedding(model, embedded).remove)
        seen: dict[str, Any] = {"layout": layout, "watch": collector.watch, "rows": rows}
        capture = Capture(model, [*sites, *extra], collector, **seen, **(kept.options() if kept is not None else {}))
        stack.enter_context(capture)
        total, out.tokens, weighted, out.by_context = _total(model, inputs, reading=reading, loss=loss, targets=targets)
        out.loss = float(total.detach()) if out.tokens or loss is not None else 0.0
        out.weighted_loss = None if weighted is None else float(weighted.detach())
        if targets is not None and targets.gradients and weighted is not None:
            total = weighted
        reached = [(site, *edge) for site in sites for edge in collector.edges.get(site, ())]
        # frozen weights have no gradient and are missing in the result
        learning = [name for name in weights if named[name].requires_grad]
        tensors = [edge for _, edge, _ in reached] + [x for _, x in embedded] + [named[n] for n in learning]
        if not total.requires_grad or not tensors:
            raise AnisoscopeError(
                "no gradient reaches any site: every parameter is frozen; unfreeze the ones that learn "
                "(parameter.requires_grad_(True))."
            )
        grads = torch.autograd.grad(total, tensors, allow_unused=True)
    second, third = len(reached), len(reached) + len(embedded)
    gradients: dict[Site, Tensor] = {}
    for (site, _, rows_of), g in zip(reached, grads[:second], strict=True):
        if g is not None:
            gradients[site] = gradients[site] + rows_of(g) if site in gradients else rows_of(g)
    out.unreached = [site for site in sites if site not in gradients]
    arrived = zip(embedded, grads[second:third], strict=True)
    pairs = [pair for (ids, x), g in arrived if g is not None and (pair := embedded_part(model, ids, x, g))]
    if pairs:  # some embeddings scale their output
        scale = getattr(unwrapped(model).get_input_embeddings(), "embed_scale", 1.0)  # type: ignore[operator]
        by_token = torch.cat([g.flatten(0, -2) for _, g in pairs]).detach() * float(scale)
        out.embedded = torch.cat([ids.flatten() for ids, _ in pairs]), by_token
    out.weights = {name: g.detach() for name, g in zip(learning, grads[third:], strict=True) if g is not None}
    out.sites = site_rows(sites, collector.kept, gradients, inputs=inputs, reading=reading)
    return out


def _total(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    reading: LabelConvention | None,
    loss: LossRule | None,
    targets: TargetWeights | None,
) -> tuple[Tensor, int, Tensor | None, ContextLosses | None]:
    """The summed loss with its graph, the number of targets, the loss with weights of targets, the loss by context."""
    labels = inputs.get("labels")
    if isinstance(loss, ContextObjective):
        each = loss.by_context(model, inputs)
        known = each.detach().double().cpu(), context_units(loss, inputs, reading)
        return each.sum(), units(loss, inputs, reading), None, known
    if loss is not None:
        total = loss(model, inputs)
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise AnisoscopeError(f"loss= returned {type(total).__name__}; expected the summed loss as one number.")
        return total, units(loss, inputs, reading), None, None
    if not isinstance(labels, Tensor):
        raise AnisoscopeError("the batch has no labels, so there is no loss; add labels, or give loss=.")
    output = forward(model, inputs)
    logits = output_part(output, "logits")
    reading = reading or find_label_convention(model, output, labels)
    tokens = reading.count(labels)
    if not tokens:  # these contexts have no targets
        nothing = logits.sum() * 0.0
        return nothing, 0, nothing if targets is not None else None, None
    weighted = None if targets is None else targets.loss(logits, labels, reading)
    by_context = reading.by_context(logits, labels)
    if isinstance(logits, Tensor) and logits.dtype == torch.float64:  # transformers computes the loss in float32
        return reading.summed(logits, labels), tokens, weighted, by_context
    return output_part(output, "loss").double() * tokens, tokens, weighted, by_context


def units(loss: LossRule | None, inputs: Mapping[str, Any], reading: LabelConvention | None) -> int:
    """What a summed loss is over: the units of an objective, else target tokens; 0 if that is not known."""
    if (count := getattr(loss, "count", None)) is not None:
        return int(count(inputs))
    labels = inputs.get("labels")
    return reading.count(labels) if reading is not None and isinstance(labels, Tensor) else 0


def context_units(loss: LossRule | None, inputs: Mapping[str, Any], reading: LabelConvention | None) -> Tensor:
    """What the summed loss of each context is over, int64 [B]."""
    return torch.tensor([units(loss, part, reading) for part in one_by_one(inputs)])


def embedded_part(model: nn.Module, ids: Tensor, output: Tensor, g: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ids and gradients of embeddings that this process adds: of several with the same ids those of the first count.

    If the positions are split over processes, each adds its own.
    """
    group = together(model) if sharded(model) else None
    if group is None:
        return ids, g
    what = "the input embedding"
    piece = piece_of(output, group, length=ids.shape[-1], batch=len(ids), what=what)
    own = plain(g, shape=plain(output, what=what).shape, what=what)
    if piece is None:
        return None if group.place else (ids, own)
    return ids[:, piece.start : piece.stop], own


def _watch_embedding(model: nn.Module, outputs: list[tuple[Tensor, Tensor]]) -> Any:
    """A hook that keeps ids and outputs of the input embedding; the latter's gradients by token are the table's."""

    def keep(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and args and isinstance(args[0], Tensor):
            outputs.append((args[0].detach(), output))

    return unwrapped(model).get_input_embeddings().register_forward_hook(keep)  # type: ignore[operator]


def site_rows(
    sites: Sequence[Site],
    kept: Mapping[Site, Rows],
    gradients: Mapping[Site, Tensor],
    *,
    inputs: Mapping[str, Any],
    reading: LabelConvention | None,
    contexts: Tensor | None = None,
) -> dict[Site, SiteRows]:
    """Rows, gradients and tokens of the sites that were seen; with `contexts` of these only, as `Index.among`."""
    labels, hidden = inputs.get("labels"), hidden_positions(inputs)
    labels = labels.detach().cpu() if isinstance(labels, Tensor) else None
    found: dict[Site, SiteRows] = {}
    known: dict[tuple[int, str, torch.device], tuple[Tensor | None, Index, RowTokens]] = {}  # sites of a stack share it
    for site in sites:
        if (rows := kept.get(site)) is None:
            continue
        x, g, key = rows.x, gradients.get(site), (id(rows.index), site.stack, rows.x.device)
        if key not in known:
            at, index = None, rows.index
            if contexts is not None:
                chosen = index.among(contexts)
                at, index = chosen.to(x.device), index.taken(chosen)
            known[key] = at, index, RowTokens.of(index, labels, reading, stack=site.stack, hidden=hidden)
        at, index, tokens = known[key]
        if at is not None:
            x, g = x[at], None if g is None else g[at]
        found[site] = SiteRows(x, g, index, tokens)
    return found


def stream_readers(
    model: nn.Module, layout: Layout, inputs: Mapping[str, Any], *, rows: Rule | None = None
) -> dict[Site, list[str]]:
    """The weights (parameter names) of the linears that read `attn_in` and `mlp_in` of each layer.

    A linear reads a site if its input is the same memory. Weights shared by several layers are left out.
    """
    kinds: list[str] = [kind for kind in ("attn_in", "mlp_in") if kind in layout.kinds]
    if not kinds:
        return {}
    sites = layout.sites(kinds)
    given: list[tuple[str, Tensor]] = []
    collector = Collector()

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            given.append((name, args[0]))

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                hook = functools.partial(keep, f"{path}.weight")
                stack.callback(module.register_forward_pre_hook(hook).remove)
        capture = Capture(model, sites, collector, layout=layout, watch=collector.watch, rows=rows)
        with untouched(model), torch.no_grad(), capture:
            forward(model, inputs)
    found = {site: [name for name, x in given if _same(x, collector.live[site][0])] for site in collector.live}
    uses = [name for names in found.values() for name in names]
    return {s: names for s, names in found.items() if names and all(uses.count(name) == 1 for name in names)}


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape[-1] == y.shape[-1] and x.numel() == y.numel()


def as_rows(model: nn.Module, name: str, gradient: Tensor) -> Tensor:
    """A weight's gradient as rows in the space of its input [out, in]; that of a Conv1D is transposed."""
    module = model.get_submodule(name.rpartition(".")[0])
    return gradient.T if type(module).__name__ == "Conv1D" else gradient


def joined(model: nn.Module, names: Sequence[str], gradients: Mapping[str, Tensor]) -> Tensor | None:
    """The gradients of all weights that read one site, as rows in one tensor; None if there are none."""
    parts = [as_rows(model, name, gradients[name]) for name in names if name in gradients]
    if not parts:
        return None
    whole = torch.cat(parts)
    return whole if whole.dtype == torch.float64 else whole.float()
