"""Train a language model on answers that can be checked, with predictive divergence masks (arXiv:2607.10848).

    python examples/train_pdm.py

needs no GPU, no download and less than four minutes: a small Qwen3 that adds two-digit numbers, right about six times
in ten, is trained on with PDM and tested on sums it has never seen. The settings are those of
configs/recipes/default.yaml; flags, or a YAML file given as `--config`, replace single ones. Any other model and data:

    python examples/train_pdm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K
"""

import json
import os
import random
import string
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # every weight sync warns of modules that have no weights

import pandas as pd
import torch
import yaml
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, ProgressCallback, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available
from trl.rewards import accuracy_reward

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


@dataclass
class PDMScriptArguments(ScriptArguments):
    warm_start_accuracy: float = field(
        default=0.6, metadata={"help": "Without a model: accuracy at which PDM begins."}
    )


def warm_start(folder, sums, accuracy):
    """Save a character-level tokenizer and a small Qwen3, trained on `sums` until `accuracy` of them come out right."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.printable])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, max_position_embeddings=512)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32, tie_word_embeddings=True)
    config = Qwen3Config(
        vocab_size=len(vocab), pad_token_id=0, eos_token_id=1, initializer_range=0.05, **shape, **heads
    )
    model = Qwen3ForCausalLM(config)

    texts = [row["prompt"] + row["solution"] + "<eos>" for row in sums]
    ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    labels[:, : len("12+34=")] = -100
    optimizer, reached = torch.optim.AdamW(model.parameters(), lr=2e-3), 0.0
    while reached < accuracy:
        batch = torch.randint(len(ids), (128,))
        output = model(ids[batch], labels=labels[batch])
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guessed, wanted = output.logits[:, :-1].argmax(-1), labels[batch, 1:]
        right = ((guessed == wanted) | (wanted == -100)).all(1)  # all tokens are, so greedy decoding says the same
        reached = 0.8 * reached + 0.2 * right.float().mean().item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def exact_match(completions, solution, **kwargs):
    return [float(completion == answer) for completion, answer in zip(completions, solution, strict=True)]


def greedy_accuracy(trainer, sums):
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer([row["prompt"] for row in sums], return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=trainer.args.max_completion_length, do_sample=False)
    answers = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(exact_match(answers, [row["solution"] for row in sums])) / len(sums)


def as_chat(row):
    question = next(row[name] for name in ("prompt", "problem", "question") if name in row)
    prompt = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return {"prompt": prompt, "solution": str(row["solution"] if "solution" in row else row["answer"])}


class ProgressBar(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "reward" in logs:
            masked = logs.get("trust_region/masked", 0.0)
            self.training_bar.set_postfix(reward=f"{logs['reward']:.2f}", masked=f"{masked:.1%}")


def main(script_args, training_args, model_args):
    output_dir, name = Path(training_args.output_dir), script_args.dataset_name
    if model_args.model_name_or_path is None:  # two-digit sums; a held-out one is new in both orders
        pairs = [{(a, b), (b, a)} for a in range(10, 100) for b in range(a, 100)]
        random.Random(training_args.seed).shuffle(pairs)
        rows = [[{"prompt": f"{a}+{b}=", "solution": f"{a + b}"} for a, b in sorted(pair)] for pair in pairs]
        held_out, sums = sum(rows[:500], []), sum(rows[500:], [])
        model_args.model_name_or_path = str(output_dir / "base")
        with training_args.main_process_first():
            if training_args.process_index == 0:
                set_seed(training_args.seed)
                torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
                warm_start(model_args.model_name_or_path, sums, script_args.warm_start_accuracy)
        dataset, reward = {"train": Dataset.from_list(sums)}, exact_match
    else:
        source = dict(path="json", data_files=name) if Path(name).is_file() else dict(path=name)
        dataset = load_dataset(**source, name=script_args.dataset_config).map(as_chat)
        held_out, reward = [], accuracy_reward

    if training_args.use_vllm and not is_vllm_available():
        training_args.use_vllm = False
    loading = dict(revision=model_args.model_revision, dtype=model_args.dtype)
    loading["attn_implementation"] = model_args.attn_implementation
    training_args.model_init_kwargs = loading | (training_args.model_init_kwargs or {})
    trainer = PDMGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.accelerator.print("Rollouts by", "vLLM" if trainer.use_vllm else "transformers, which is slower than vLLM")

    accuracy = {"before": greedy_accuracy(trainer, held_out) if held_out else None}
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    accuracy["after"] = greedy_accuracy(trainer, held_out) if held_out else None
    trainer.save_model(training_args.output_dir)
    if trainer.is_world_process_zero():
        metrics = dict(seed=training_args.seed, accuracy=accuracy, log_history=trainer.state.log_history)
        (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2))
        panels = [("reward",), ("trust_region/outside", "trust_region/masked"), ("trust_region/divergence_mean",)]
        curves = pd.DataFrame(metrics["log_history"]).set_index("step").reindex(columns=sum(panels, ()))
        title = "accuracy before={before:.2f} after={after:.2f}".format(**accuracy) if held_out else "PDM"
        axes = curves.dropna(subset="reward").plot(
            subplots=panels, figsize=(7, 7), xlabel="optimizer step", title=title
        )
        axes[0].figure.savefig(output_dir / "training.png", dpi=150)
        print(title)


if __name__ == "__main__":
    parser = TrlParser((PDMScriptArguments, PDMGRPOConfig, ModelConfig))
    given, _ = TrlParser(ModelConfig, add_help=False).parse_args_and_config(return_remaining_strings=True)
    recipe = Path(__file__).parents[1] / "configs" / "recipes" / "default.yaml"
    parser.set_defaults_with_config(
        **(yaml.safe_load(recipe.read_text()) if given.model_name_or_path is None else {"use_vllm": True})
    )
    main(*parser.parse_args_and_config())
