"""What the behaviour policy's top K costs in a rollout: this package against stock TRL, side by side.

Stock is TRL's `VLLMGeneration` as `GRPOTrainer` uses it: the sampled token's logprob alone. Both share one vLLM engine
and take turns, so neither the engine nor the load of the machine favours one of them.

    python examples/benchmarks/rollout.py
    python examples/benchmarks/rollout.py --model path/to/a/model --top_k 20

The larger the vocabulary, the larger the share of the model in the time of both. On a CPU that is busy with other
things, set OMP_NUM_THREADS=1 and VLLM_CPU_OMP_THREADS_BIND=nobind: an engine's threads would wait for each other.
"""

import argparse
import os
import statistics
import tempfile
import time


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from accelerate import Accelerator
from tiny_model import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_pdm.rollout import TopKVLLMGeneration, collate


SHAPE = dict(hidden_size=64, intermediate_size=128, num_key_value_heads=2)  # small beside its logprobs


def main(args: argparse.Namespace, folder: str) -> None:
    torch.manual_seed(0)
    path = args.model or tiny_model(folder, args.vocab_size, **SHAPE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    vocab_size = model.config.get_text_config().vocab_size
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    common = dict(
        model=model,
        accelerator=accelerator,
        processing_class=tokenizer,
        gpu_memory_utilization=0.3,
        max_model_length=args.prompt_length + args.length,
        max_num_seqs=args.sequences,
        max_completion_length=args.length,
        generation_kwargs={"ignore_eos": True},  # the same number of tokens in every turn
    )
    engines, LLM = [], vllm_generation.LLM

    def one_engine(**kwargs):
        if not engines:
            engines.append(LLM(**kwargs | {"max_logprobs": max(args.top_k)}))
        return engines[0]

    vllm_generation.LLM = one_engine
    backends = {0: VLLMGeneration(logprobs=0, **common)}
    backends |= {top_k: TopKVLLMGeneration(num_candidates=top_k, **common) for top_k in args.top_k}
    prompts = torch.randint(2, vocab_size, (args.sequences, args.prompt_length)).tolist()

    rollout_times = {top_k: [] for top_k in backends}
    batch_times = {top_k: [] for top_k in args.top_k}
    order = list(backends)
    for turn in range(args.turns + 1):
        for top_k in order:
            start = time.perf_counter()
            _, completion_ids, logprobs, _ = backends[top_k].generate(prompts, None, 1)
            logprobs = [[lp[0] for lp in sequence] for sequence in logprobs]  # as `GRPOTrainer` does
            rollout_times[top_k].append(time.perf_counter() - start)
            if top_k:
                completions = torch.tensor([list(ids) for ids in completion_ids])
                start = time.perf_counter()
                collate(logprobs, completions, top_k, vocab_size)
                batch_times[top_k].append(time.perf_counter() - start)
        if turn == 0:  # it warmed up
            for times in (*rollout_times.values(), *batch_times.values()):
                times.clear()
        order = order[1:] + order[:1]

    print(f"\n{args.sequences} sequences of {args.length} tokens, vocabulary of {vocab_size}, medians of {args.turns}")
    print(f"{'K':>10}  {'generation + extraction':>23}  {'into the batch':>14}")
    medians = {top_k: statistics.median(times) for top_k, times in rollout_times.items()}
    for top_k, seconds in medians.items():
        batch = f"{statistics.median(batch_times[top_k]):.3f} s" if top_k else ""
        print(f"{top_k or '0 (stock)':>10}  {seconds:21.3f} s  {batch:>14}")
    for top_k in args.top_k:
        turns = sorted(ours / stock for ours, stock in zip(rollout_times[top_k], rollout_times[0], strict=True))
        print(
            f"K={top_k}: {medians[top_k] / medians[0]:.2f} of stock's time "
            f"(turn by turn {turns[0]:.2f} to {turns[-1]:.2f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local model folder; by default a tiny random model")
    parser.add_argument("--vocab_size", type=int, default=128, help="of the tiny model")
    parser.add_argument("--top_k", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt_length", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--turns", type=int, default=7)
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), folder)
