"""Train a language model with predictive divergence masks (PDM, arXiv:2607.10848) on answers that can be checked.

    python examples/train_pdm.py

needs no GPU, no download and less than four minutes: a small Qwen3 that gets six of ten two-digit sums right is trained
on, as configs/recipes/default.yaml says. Flags, or a YAML file after `--config`, replace single settings. In general:

    python examples/train_pdm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # a sync that leaves weights behind is one

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
    warm_start_accuracy: float = field(default=0.55, metadata={"help": "Accuracy at which PDM takes over."})
    reward: str = field(
        default="accuracy",
        metadata={
            "help": "How to judge: 'accuracy', TRL's, of an answer in \\boxed{}, or 'exact_match', of the whole completion.",
            "choices": ["accuracy", "exact_match"],
        },
    )


def warm_start(folder, sums, accuracy):
    """Save a character-level tokenizer and a small Qwen3, trained on `sums` until `accuracy` of them come out right."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    size = dict(num_hidden_layers=2, hidden_size=128, intermediate_size=256, head_dim=32, num_attention_heads=4)
    size |= dict(num_key_value_heads=4, tie_word_embeddings=True, initializer_range=0.05)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(vocab), pad_token_id=0, eos_token_id=1, **size))
    ids = tokenizer([s["prompt"] + s["solution"] + "<eos>" for s in sums], padding=True, return_tensors="pt").input_ids
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
    return [float(chat[-1]["content"] == answer) for chat, answer in zip(completions, solution, strict=True)]


def greedy_accuracy(trainer, sums):
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer([row["prompt"] for row in sums], return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=trainer.args.max_completion_length, do_sample=False)
    answers = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(answer == row["solution"] for answer, row in zip(answers, sums, strict=True)) / len(sums)


def as_chat(row):
    columns = ("prompt", "problem", "question"), ("solution", "answer")
    question, answer = (next((row[name] for name in names if name in row), None) for names in columns)
    if question is None or answer is None:
        raise ValueError(
            f"The dataset needs one of the columns {columns[0]} and one of {columns[1]}, got {list(row)}."
        )
    prompt = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return {"prompt": prompt, "solution": str(answer)}


class ProgressBar(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "reward" in logs:
            shown = {"reward": "reward {:.2f}", "trust_region/masked": "masked {:.1%}"}
            shown |= {"step_time": "{:.2g} s a step", "weight_sync/seconds": "{:.2g} s a sync"}
            texts = [text.format(logs[name]) for name, text in shown.items() if name in logs]
            self.training_bar.set_postfix_str(", ".join(texts))


def main(script_args, training_args, model_args):
    name, output_dir, held_out = script_args.dataset_name, Path(training_args.output_dir), []
    if (model_args.model_name_or_path is None) != (name is None):
        raise ValueError("Give both `model_name_or_path` and `dataset_name`, or neither.")
    if name is None:  # two-digit sums; those held out appear in neither order elsewhere
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
        splits = {"train": sums, "test": held_out}
        dataset = {split: Dataset.from_list([as_chat(row) for row in rows]) for split, rows in splits.items()}
    else:
        source = dict(path="json", data_files=name) if Path(name).is_file() else dict(path=name)
        dataset = load_dataset(**source, name=script_args.dataset_config).map(as_chat)

    if name is None and not is_vllm_available():  # the default run asks for vLLM, not its user
        training_args.use_vllm = False
    loading = dict(revision=model_args.model_revision, attn_implementation=model_args.attn_implementation)
    training_args.model_init_kwargs = loading | {"dtype": model_args.dtype} | (training_args.model_init_kwargs or {})
    trainer = PDMGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs={"accuracy": accuracy_reward, "exact_match": exact_match}[script_args.reward],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.accelerator.print("Rollouts by", "vLLM." if trainer.use_vllm else "transformers, without vLLM: slower.")

    accuracy = {"before": greedy_accuracy(trainer, held_out)} if held_out else {}
    resume = training_args.resume_from_checkpoint  # a folder, or `true` for the last complete checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    accuracy |= {"after": greedy_accuracy(trainer, held_out)} if held_out else {}
    trainer.save_model(training_args.output_dir)
    if trainer.is_world_process_zero():
        metrics = dict(seed=training_args.seed, accuracy=accuracy, log_history=trainer.state.log_history)
        (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2))
        title = "accuracy before={before:.2f} after={after:.2f}".format(**accuracy) if held_out else str(output_dir)
        panels = [("reward",), ("trust_region/outside", "trust_region/masked"), ("trust_region/divergence_mean",)]
        curves = (
            pd.DataFrame(metrics["log_history"], columns=["step", *sum(panels, ())])
            .dropna(subset="reward")
            .interpolate()
        )
        axes = curves.plot("step", subplots=panels, figsize=(7, 7), grid=True, title=title, marker=".")
        axes[0].figure.savefig(output_dir / "training.png", dpi=150, bbox_inches="tight")
        print(f"Saved in {output_dir}, with metrics.json and training.png.")
        print(title)


if __name__ == "__main__":
    parser = TrlParser(
        (PDMScriptArguments, PDMGRPOConfig, ModelConfig),
        description="Defaults are those of the built-in run. Of others: --model_name_or_path MODEL --help",
    )
    given, _ = TrlParser(ModelConfig, add_help=False).parse_args_and_config(return_remaining_strings=True)
    recipe = Path(__file__).parents[1] / "configs" / "recipes" / "default.yaml"
    defaults = {"use_vllm": is_vllm_available()} if given.model_name_or_path else yaml.safe_load(recipe.read_text())
    parser.set_defaults_with_config(**defaults)
    main(*parser.parse_args_and_config())
