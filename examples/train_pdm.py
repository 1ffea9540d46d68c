"""Train a language model with predictive divergence masks (PDM, arXiv:2607.10848) on answers that can be checked.

    python examples/train_pdm.py

needs no GPU, no download and less than four minutes. It makes a small Qwen3 that gets six of ten two-digit sums right,
and trains it further, with the settings of configs/recipes/default.yaml. Flags, or a YAML file after `--config`,
replace single settings. To train your own model on your own problems:

    python examples/train_pdm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K
"""

import json
import sys
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import quiet  # first: it silences what other packages say as they are imported


# isort: split
import pandas as pd
import yaml
from loading import TaskError, check_columns, check_lengths, load_function, load_problems, load_rewards
from tasks import chats, exact_match, greedy_accuracy, sums, warm_start
from transformers import AutoTokenizer, ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


PLOTTED = ("reward",), ("trust_region/outside", "trust_region/masked"), ("trust_region/divergence_mean",)


@dataclass
class PDMScriptArguments(ScriptArguments):
    warm_start_accuracy: float = field(
        default=0.55,
        metadata={"help": "Accuracy that supervised training gives the small model before PDM trains it."},
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: names of TRL's, 'exact_match', 'my_file.py:function' or dotted paths. Default: "
            "the dataset's own with 'reasoning_gym:NAME', else 'accuracy_reward', which reads an answer in \\boxed{}."
        },
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "Functions the model may call: 'my_file.py:function' or dotted paths."}
    )


class ProgressBar(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "reward" in logs:
            shown = {"reward": "reward {:.2f}", "trust_region/masked": "masked {:.1%}"}
            shown |= {"step_time": "{:.2g} s a step", "weight_sync/seconds": "{:.2g} s a sync"}
            texts = [text.format(logs[name]) for name, text in shown.items() if name in logs]
            self.training_bar.set_postfix_str(", ".join(texts))


def main(script_args, training_args, model_args):
    quiet.bars(training_args.use_vllm and is_vllm_available())

    # Problems, rewards and a model: those given, or two-digit sums and a small model that gets some of them right
    built_in, output_dir = script_args.dataset_name is None, Path(training_args.output_dir)
    if (model_args.model_name_or_path is None) != built_in:
        raise TaskError("Give both `model_name_or_path` and `dataset_name`, or neither.")
    limit, splits = training_args.max_completion_length, {script_args.dataset_train_split}
    given, weights = script_args.reward_funcs, training_args.reward_weights
    rewards = load_rewards(given or ["accuracy_reward"], weights, limit)
    tools = [load_function(name, "tools") for name in script_args.tools or []]
    if built_in:
        rows, held_out = sums(training_args.seed)
        dataset = {"train": chats(rows), "test": chats(held_out)}
        training_args.use_vllm &= is_vllm_available()  # the recipe asks for vLLM, not its user
    else:
        dataset, graded = load_problems(script_args.dataset_name, script_args.dataset_config, training_args.seed)
        rewards = rewards if given or graded is None else [graded]
        splits |= {script_args.dataset_test_split} if training_args.eval_strategy != "no" else set()
        if missing := splits - set(dataset):
            raise TaskError(f"`dataset_name` has no split {missing.pop()!r}, only {list(dataset)}.")
    for split in splits:
        check_columns(rewards, dataset[split])
        if training_args.use_vllm and training_args.vllm_max_model_length and not built_in:
            tokenizer = AutoTokenizer.from_pretrained(
                model_args.model_name_or_path, revision=model_args.model_revision
            )
            check_lengths(dataset[split], split, tokenizer, limit, training_args.vllm_max_model_length)

    # What is about to happen
    steps, batch = training_args.max_steps, training_args.per_device_train_batch_size
    batch *= training_args.gradient_accumulation_steps * training_args.world_size
    length = f"{steps} steps" if steps > 0 else f"{training_args.num_train_epochs:g} epochs"
    takes = f"about {ceil(1 + steps / 100)} minutes" if built_in else "the bar says for how long"
    if training_args.process_index == 0:
        print(f"Training {model_args.model_name_or_path or 'a small Qwen3, made here,'} on", end=" ")
        print(f"{len(dataset[script_args.dataset_train_split])} problems: {length} of {batch} completions, {takes}.")
        engine = f"vLLM, {training_args.vllm_mode}" if training_args.use_vllm else "transformers, without vLLM: slower"
        print(f"Rollouts by {engine}.")
        print(f"Trust region: {training_args.bounds}.")
        print(f"Results go to {output_dir}.", flush=True)
    if built_in:
        model_args.model_name_or_path = str(output_dir / "base")
        with training_args.main_process_first():
            if training_args.process_index == 0:
                accuracy = script_args.warm_start_accuracy
                warm_start(model_args.model_name_or_path, rows, accuracy, training_args.seed)

    # The trainer: TRL's `GRPOTrainer`, but for the name
    loading = dict(revision=model_args.model_revision, attn_implementation=model_args.attn_implementation)
    training_args.model_init_kwargs = loading | {"dtype": model_args.dtype} | (training_args.model_init_kwargs or {})
    trainer = PDMGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        tools=tools or None,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)

    # Training, and the accuracy before and after it on sums that were held out
    def measure():
        model = trainer.accelerator.unwrap_model(trainer.model)
        return greedy_accuracy(model, trainer.processing_class, dataset["test"], exact_match, limit)

    accuracy = {"before": measure()} if built_in else {}
    resume = training_args.resume_from_checkpoint  # a folder, or `true` for the last complete checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    accuracy |= {"after": measure()} if built_in else {}
    trainer.save_model(training_args.output_dir)
    trainer.save_state()

    # What came of it, in numbers and as a picture
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        metrics = dict(seed=training_args.seed, accuracy=accuracy, log_history=history)
        (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2))
        title = "accuracy before={before:.2f} after={after:.2f}".format(**accuracy) if built_in else str(output_dir)
        curves = pd.DataFrame(history, columns=["step", *sum(PLOTTED, ())]).dropna(subset="reward").interpolate()
        axes = curves.plot("step", subplots=PLOTTED, figsize=(7, 7), grid=True, title=title, marker=".")
        axes[0].figure.savefig(output_dir / "training.png", dpi=150, bbox_inches="tight")
        print(f"Saved in {output_dir}: the model, metrics.json and training.png.")
        print(f"To look at it: python -m trl_pdm.report {output_dir}")
        print(title if built_in else "Done.")


if __name__ == "__main__":
    parser = TrlParser(
        (PDMScriptArguments, PDMGRPOConfig, ModelConfig),
        description="Defaults are those of the built-in run. For those of others: --model_name_or_path MODEL --help",
    )
    given, _ = TrlParser(ModelConfig, add_help=False).parse_args_and_config(return_remaining_strings=True)
    recipe = Path(__file__).parents[1] / "configs" / "recipes" / "default.yaml"
    defaults = {"use_vllm": is_vllm_available()} if given.model_name_or_path else yaml.safe_load(recipe.read_text())
    parser.set_defaults_with_config(**defaults)
    try:
        main(*parser.parse_args_and_config())
    except TaskError as error:
        sys.exit(f"train_pdm.py: {error}")
