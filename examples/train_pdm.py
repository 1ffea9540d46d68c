"""Train a language model with predictive divergence masks (PDM, arXiv:2607.10848) on answers that can be checked.

    python examples/train_pdm.py

needs no GPU, no download and less than four minutes: a small Qwen3 that gets six of ten two-digit sums right is trained
on, as configs/recipes/default.yaml says. Flags, or a YAML file after `--config`, replace single settings. In general:

    python examples/train_pdm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # a sync that leaves weights behind is one

import pandas as pd
import yaml
from tasks import chats, exact_match, greedy_accuracy, load_chats, sums, warm_start
from transformers import ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available
from trl.rewards import accuracy_reward

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


REWARDS = {"accuracy": accuracy_reward, "exact_match": exact_match}
PLOTTED = ("reward",), ("trust_region/outside", "trust_region/masked"), ("trust_region/divergence_mean",)


@dataclass
class PDMScriptArguments(ScriptArguments):
    warm_start_accuracy: float = field(default=0.55, metadata={"help": "Accuracy at which PDM takes over."})
    reward: str = field(
        default="accuracy",
        metadata={
            "help": "How to judge: 'accuracy', TRL's, of an answer in \\boxed{}, or 'exact_match', of the whole completion.",
            "choices": list(REWARDS),
        },
    )


class ProgressBar(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "reward" in logs:
            shown = {"reward": "reward {:.2f}", "trust_region/masked": "masked {:.1%}"}
            shown |= {"step_time": "{:.2g} s a step", "weight_sync/seconds": "{:.2g} s a sync"}
            texts = [text.format(logs[name]) for name, text in shown.items() if name in logs]
            self.training_bar.set_postfix_str(", ".join(texts))


def main(script_args, training_args, model_args):
    # Problems and a model: those given, or two-digit sums and a small model that gets some of them right
    built_in, output_dir = script_args.dataset_name is None, Path(training_args.output_dir)
    if (model_args.model_name_or_path is None) != built_in:
        raise ValueError("Give both `model_name_or_path` and `dataset_name`, or neither.")
    if built_in:
        rows, held_out = sums(training_args.seed)
        dataset = {"train": chats(rows), "test": chats(held_out)}
        model_args.model_name_or_path = str(output_dir / "base")
        with training_args.main_process_first():
            if training_args.process_index == 0:
                accuracy = script_args.warm_start_accuracy
                warm_start(model_args.model_name_or_path, rows, accuracy, training_args.seed)
        training_args.use_vllm &= is_vllm_available()  # the recipe asks for vLLM, not its user
    else:
        dataset = load_chats(script_args.dataset_name, script_args.dataset_config)

    # The trainer: TRL's `GRPOTrainer`, but for the name
    loading = dict(revision=model_args.model_revision, attn_implementation=model_args.attn_implementation)
    training_args.model_init_kwargs = loading | {"dtype": model_args.dtype} | (training_args.model_init_kwargs or {})
    trainer = PDMGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=REWARDS[script_args.reward],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.accelerator.print("Rollouts by", "vLLM." if trainer.use_vllm else "transformers, without vLLM: slower.")

    # Training, and the accuracy before and after it on sums that were held out
    def measure():
        model = trainer.accelerator.unwrap_model(trainer.model)
        limit = training_args.max_completion_length
        return greedy_accuracy(model, trainer.processing_class, dataset["test"], exact_match, limit)

    accuracy = {"before": measure()} if built_in else {}
    resume = training_args.resume_from_checkpoint  # a folder, or `true` for the last complete checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    accuracy |= {"after": measure()} if built_in else {}
    trainer.save_model(training_args.output_dir)

    # What came of it, in numbers and as a picture
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        metrics = dict(seed=training_args.seed, accuracy=accuracy, log_history=history)
        (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2))
        title = "accuracy before={before:.2f} after={after:.2f}".format(**accuracy) if built_in else str(output_dir)
        curves = pd.DataFrame(history, columns=["step", *sum(PLOTTED, ())]).dropna(subset="reward").interpolate()
        axes = curves.plot("step", subplots=PLOTTED, figsize=(7, 7), grid=True, title=title, marker=".")
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
