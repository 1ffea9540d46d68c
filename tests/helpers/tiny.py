"""Tiny, real models, tokenizers and data that the tests share."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"


def tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def model(
    vocab_size: int, seed: int = 0, moe: bool = False, router_bias: bool = False, **overrides
) -> PreTrainedModel:
    """A random Qwen3 (GLM-4 MoE with `router_bias`), peaked enough for its divergences to mean something."""
    torch.manual_seed(seed)
    config = dict(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config |= overrides
    if moe:
        config |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True)
        built = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
    elif router_bias:  # a buffer of the model, a parameter of vLLM's
        config |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
        built = Glm4MoeForCausalLM(Glm4MoeConfig(**config))
        built.model.layers[1].mlp.gate.e_score_correction_bias += torch.tensor([3.0, -3.0, 1.0, -1.0])
    else:
        built = Qwen3ForCausalLM(Qwen3Config(**config))
    with torch.no_grad():
        # A tied head times its own embedding is peaked by itself
        built.lm_head.weight.mul_(3 if config["tie_word_embeddings"] else 8)
    return built


def save(path: Path, **overrides) -> str:
    """A model and its tokenizer as a Hugging Face folder."""
    tok = tokenizer()
    model(len(tok), **overrides).save_pretrained(path)
    tok.save_pretrained(path)
    return str(path)


def prompts(n: int = 64) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i % 90 + 10}+{i % 7 + 1}=" for i in range(n)]})


def count_ones(completions, **kwargs) -> list[float]:
    """A reward that differs between completions, whatever the model."""
    return [completion.count("1") - 0.1 * len(completion) for completion in completions]
