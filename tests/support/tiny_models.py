"""Tiny randomly initialised models of every family, with weights large enough that each part matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 60
PAD = 1


def _config(name: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**options)


def _plain(**options: Any) -> dict[str, Any]:
    """The names that most configurations share."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    return {**common, **options}


def _grouped(**options: Any) -> dict[str, Any]:
    return _plain(num_key_value_heads=2, **options)


def _gpt(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
        "bos_token_id": 2, "eos_token_id": 3, **options,
    }  # fmt: skip


def _t5(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
        "num_heads": 4, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, **options,
    }  # fmt: skip


def _bart(**options: Any) -> dict[str, Any]:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    ids = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    return {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, **sizes, **ids, **options}


def _falcon(**options: Any) -> dict[str, Any]:
    return _plain(**{"intermediate_size": 128, "ffn_hidden_size": 128, "bias": True, **options})


def _bert_like(**options: Any) -> dict[str, Any]:
    return _plain(**{"type_vocab_size": 2, **options})


# name -> (configuration class, options, model class)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", _bert_like(), "BertModel"),
    "bert-masked": ("BertConfig", _bert_like(), "BertForMaskedLM"),
    "roberta": ("RobertaConfig", _bert_like(), "RobertaModel"),
    "xlm-roberta": ("XLMRobertaConfig", _bert_like(), "XLMRobertaModel"),
    "albert": ("AlbertConfig", _bert_like(embedding_size=16), "AlbertModel"),
    "albert-groups": (
        "AlbertConfig",
        _bert_like(embedding_size=16, num_hidden_layers=4, num_hidden_groups=2, inner_group_num=2),
        "AlbertForMaskedLM",
    ),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "pad_token_id": PAD,
         "max_position_embeddings": 64},
        "DistilBertModel",
    ),
    "modernbert": (
        "ModernBertConfig",
        _plain(cls_token_id=4, sep_token_id=5, local_attention=6, global_attn_every_n_layers=2),
        "ModernBertModel",
    ),
    "electra": ("ElectraConfig", _bert_like(embedding_size=16), "ElectraModel"),
    "eurobert": ("EuroBertConfig", _grouped(mask_token_id=4), "EuroBertModel"),
    "mpnet": ("MPNetConfig", _plain(), "MPNetModel"),
    "deberta-v2": (
        "DebertaV2Config",
        _bert_like(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm"),
        "DebertaV2Model",
    ),
    "gpt2": ("GPT2Config", _gpt(), "GPT2LMHeadModel"),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "intermediate_size": 48},
        "GPTNeoModel",
    ),
    "gptj": ("GPTJConfig", _gpt(rotary_dim=4), "GPTJForCausalLM"),
    "codegen": ("CodeGenConfig", _gpt(rotary_dim=4, n_ctx=64), "CodeGenModel"),
    "gpt_neox": ("GPTNeoXConfig", _plain(rotary_pct=0.5), "GPTNeoXForCausalLM"),
    "gpt_neox-sequential": ("GPTNeoXConfig", _plain(use_parallel_residual=False), "GPTNeoXModel"),
    "opt": ("OPTConfig", _plain(ffn_dim=48, word_embed_proj_dim=32), "OPTForCausalLM"),
    "opt-350m": ("OPTConfig", _plain(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False), "OPTModel"),
    "llama": ("LlamaConfig", _grouped(), "LlamaForCausalLM"),
    "mistral": ("MistralConfig", _grouped(sliding_window=4, head_dim=8), "MistralModel"),
    "qwen2": ("Qwen2Config", _grouped(), "Qwen2Model"),
    "qwen3": ("Qwen3Config", _grouped(head_dim=8), "Qwen3Model"),
    "gemma": ("GemmaConfig", _grouped(head_dim=8), "GemmaModel"),
    "gemma2": ("Gemma2Config", _grouped(head_dim=8, sliding_window=4, query_pre_attn_scalar=8), "Gemma2Model"),
    "phi": ("PhiConfig", _plain(), "PhiModel"),
    "phi3": ("Phi3Config", _grouped(), "Phi3Model"),
    "starcoder2": ("Starcoder2Config", _grouped(sliding_window=None), "Starcoder2Model"),
    "stablelm": ("StableLmConfig", _grouped(), "StableLmModel"),
    "stablelm-parallel": ("StableLmConfig", _grouped(use_parallel_residual=True), "StableLmModel"),
    "granite": ("GraniteConfig", _grouped(residual_multiplier=0.3, attention_multiplier=0.2), "GraniteModel"),
    "falcon-7b": ("FalconConfig", _falcon(multi_query=True, parallel_attn=True), "FalconModel"),
    "falcon-40b": (
        "FalconConfig",
        _falcon(new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True),
        "FalconForCausalLM",
    ),
    "falcon-alibi": ("FalconConfig", _falcon(alibi=True, parallel_attn=False, multi_query=False), "FalconModel"),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": PAD},
        "BloomForCausalLM",
    ),
    "bloom-post": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": PAD,
         "apply_residual_connection_post_layernorm": True},
        "BloomModel",
    ),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 4},
        "MptModel",
    ),
    "olmo": ("OlmoConfig", _grouped(), "OlmoModel"),
    "olmo2": ("Olmo2Config", _grouped(), "Olmo2ForCausalLM"),
    "t5": ("T5Config", _t5(), "T5Model"),
    "byt5": ("T5Config", _t5(feed_forward_proj="gated-gelu"), "T5ForConditionalGeneration"),
    "t5-encoder": ("T5Config", _t5(), "T5EncoderModel"),
    "mt5": ("MT5Config", _t5(), "MT5Model"),
    "umt5": ("UMT5Config", _t5(), "UMT5Model"),
    "bart": ("BartConfig", _bart(), "BartModel"),
    "canine": (
        "CanineConfig",
        _plain(pad_token_id=0, num_hash_buckets=50, local_transformer_stride=8, downsampling_rate=4,
               upsampling_kernel_size=4, bos_token_id=None, eos_token_id=None),
        "CanineModel",
    ),
}  # fmt: skip


def tiny(
    name: str, *, attention: str | None = None, dtype: torch.dtype = torch.float32, layers: int | None = None
) -> nn.Module:
    """A tiny model of a family, in evaluation mode, with norms and biases away from their initial values."""
    import transformers

    config_class, options, model_class = FAMILIES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = _config(config_class, **options)
    if attention is not None:
        config._attn_implementation = attention
    if layers is not None:
        config.num_hidden_layers = layers
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def contexts(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random ids without special or padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(ids: list[Tensor], *, side: str = "right", pad: int = PAD) -> dict[str, Tensor]:
    """Ids and mask of a padded batch."""
    length = max(len(row) for row in ids)
    place: Callable[[Tensor, int], Tensor] = (
        (lambda row, fill: torch.cat([row, row.new_full((length - len(row),), fill)]))
        if side == "right"
        else (lambda row, fill: torch.cat([row.new_full((length - len(row),), fill), row]))
    )
    return {
        "input_ids": torch.stack([place(row, pad) for row in ids]),
        "attention_mask": torch.stack([place(torch.ones_like(row), 0) for row in ids]),
    }


def inputs(model: nn.Module, *lengths: int, side: str = "right") -> dict[str, Tensor]:
    """A padded batch, with decoder inputs of other lengths where the model has a decoder apart."""
    config: Any = model.config
    pad = getattr(config, "pad_token_id", None)
    pad = PAD if pad is None else pad
    batch = padded(contexts(*lengths), side=side, pad=pad)
    takes_decoder = bool(config.is_encoder_decoder) and "Encoder" not in type(model).__name__
    if takes_decoder:
        target = padded(contexts(*(n // 2 + 1 for n in lengths), seed=1), side=side, pad=pad)
        batch |= {f"decoder_{name}": value for name, value in target.items()}
    return batch


class Record:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.calls: list[Any] = []

    def rows(self, rows: Any) -> None:
        self.all.append(rows)

    def scores(self, scores: Any) -> None:
        self.calls.append(scores)

    def at(self, name: str) -> Any:
        """The rows of one site of the last pass."""
        return next(rows for rows in reversed(self.all) if str(rows.site) == name)


class Interrupting(Record):
    """A sink that raises at the rows of block 2."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def rows(self, rows: Any) -> None:
        if rows.site.layer == 2:
            raise self.error


def captured(model: nn.Module, batch: Any, sites: list[Any] | None = None, *, sink: Any = None, **options: Any) -> Any:
    """What one pass over a batch gives to a sink, at the usual sites unless told."""
    from anisoscope.capture import Capture, find_layout

    sink = Record() if sink is None else sink
    chosen = find_layout(model).sites() if sites is None else sites
    with Capture(model, chosen, sink, **options) as capture:
        capture.run(batch)
    return sink
