"""Train a language model on answers that can be checked, with predictive divergence masks (arXiv:2607.10848).

    python examples/train_pdm.py

needs no GPU, no download and less than four minutes. It follows configs/recipes/default.yaml: a small Qwen3 that adds
two-digit numbers and is right about six times in ten is trained further with PDM, on rollouts by vLLM, and tested before
and after on sums it has never seen. Flags, or a YAML file given as `--config`, replace single values of the recipe.

    python examples/train_pdm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K

trains any model on any dataset of problems (`prompt`, or `problem` or `question` as a chat) with verifiable answers
(`solution` or `answer`): a name on the Hub or a JSON file. It takes the flags of `PDMGRPOConfig` and TRL's `ModelConfig`.
"""

import json
import os
import random
import string
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of which the small model needs little
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # every weight sync warns of modules that hold no weights

import matplotlib
import torch
import yaml
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, ProgressCallback, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available
from trl.rewards import accuracy_reward

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


DEFAULT_RECIPE = Path(__file__).parents[1] / "configs/recipes/default.yaml"


@dataclass
class PDMScriptArguments(ScriptArguments):
    warm_start_accuracy: float = field(
        default=0.6, metadata={"help": "Share of right sums at which PDM takes over, without `model_name_or_path`."}
    )


def make_base_model(folder, sums, accuracy, seed):
    """Save a character-level tokenizer and a small Qwen3, trained by example until `accuracy` of the sums are right."""
    set_seed(seed)
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.printable])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=512,
            pad_token_id=vocab["<pad>"],
            eos_token_id=vocab["<eos>"],
        )
    )
    texts = [row["prompt"] + row["solution"] + "<eos>" for row in sums]
    ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    labels[:, : len("12+34=")] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    share_right = 0.0
    while share_right < accuracy:
        batch = torch.randint(len(ids), (128,))
        output = model(ids[batch], labels=labels[batch])
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        guesses, answers = output.logits[:, :-1].argmax(-1), labels[batch, 1:]
        all_right = ((guesses == answers) | (answers == -100)).all(1)  # what greedy decoding would get right
        share_right = 0.9 * share_right + 0.1 * all_right.float().mean().item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
