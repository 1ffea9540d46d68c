"""Tool calls and environments: the top K stays with its token over several turns, tool tokens and truncation.

The model is real, if tiny: it is trained here, for some seconds, to call a tool once or twice and then to answer.
"""

import math
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken
from trl import GRPOTrainer
from trl.generation import vllm_generation

from tests.helpers import tiny, trainers
from tests.helpers.references import reference_logps, unpadded


TOP_K = 8
MAX_COMPLETION_LENGTH = 35
ENGINE_NOISE = 0.005  # mean, in probability: a bf16 engine against a float32 trainer
CALL = ('<tool_call>{"name": "look", "arguments": {"key": "', '"}}</tool_call>')
# ChatML, without a system prompt. TRL needs a template that renders tool calls and results and keeps prefixes.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<start>user
<result>{{ message.content }}</result><eos>
{% else -%}
<start>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<eos>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start>assistant
{% endif -%}
"""
# ... and one to read the model's answer with.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<start>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def look(key: str) -> str:
    """
    Look a key up.

    Args:
        key: The key.

    Returns:
        The value.
    """
    return {"a": "1", "b": "22", "c": "333", "d": "4" * 15, "e": "5" * 16, "f": "6" * 24}[key]


class Shelf:
    """An environment of one tool, which counts how often it was used."""

    def reset(self, **kwargs) -> None:
        self.looks = 0

    def look(self, key: str) -> str:
        """
        Look a key up.

        Args:
            key: The key.

        Returns:
            The value.
        """
        self.looks += 1
        return look(key)

    def get_reward(self) -> float:
        return float(self.looks)


def make_tokenizer():
    tokenizer = tiny.tokenizer("0123456789abcdefghijklmnopqrstuvwxyz \n")
    pieces = ["<start>", "<result>", "</result>", "user", "assistant", *CALL]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def conversation(rng):
    """What the model learns: one or two calls with any key, then an answer of any digits."""
    messages = [{"role": "user", "content": f"find {rng.choice('uvwxyz')}"}]
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice("abcdef")
        call = {"type": "function", "function": {"name": "look", "arguments": {"key": key}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look", "content": look(key)})
    answer = "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 8)))
    return [*messages, {"role": "assistant", "content": answer}]


def train(model, tokenizer, steps=60, batch_size=32):
    rng = random.Random(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower in several
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = [
            torch.tensor(tokenizer.apply_chat_template(conversation(rng), return_dict=False))
            for _ in range(batch_size)
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    tokenizer = make_tokenizer()
    model = tiny.model(len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.div_(8)
    train(model, tokenizer)
    path = tmp_path_factory.mktemp("tools") / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_trainer(model_path, **options):
    prompts = [[{"role": "user", "content": f"find {letter}"}] for letter in "uvwxyz" * 8]
    defaults = dict(
        use_vllm=True,
        divergence_top_k=TOP_K,
        divergence_threshold=0.02,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=1.0,
        per_device_train_batch_size=32,
        num_generations=4,
        learning_rate=3e-4,
        max_steps=4,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=128,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
        **trainers.TWO_STEPS,
    )
    return trainers.make_trainer(model_path.parent, model=str(model_path), **defaults | options)


def length_of_answer(completions, **kwargs):
    return [len(completion[-1]["content"]) for completion in completions]


@pytest.fixture(scope="module")
def engine(model_path):
    eager = partial(vllm_generation.LLM, enforce_eager=True)  # compiling would take longer than all of these tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "LLM", eager)
        return make_trainer(model_path, reward_funcs=length_of_answer, tools=[look])


@pytest.fixture
def on_engine(engine, model_path, monkeypatch):
    def make(**kwargs):
        monkeypatch.setattr(vllm_generation, "LLM", lambda **_: engine.vllm_generation.llm)
        trainer = make_trainer(model_path, **kwargs)
        trainer.state.global_step += 1  # TRL syncs when a training step has been made
        return trainer

    return make


def rollout(trainer):
    trainer.model.train()
    rows = [dict(row) for row in trainer.train_dataset.select(range(16)) for _ in range(4)]
    return trainer._generate_and_score_completions(rows)


def assert_aligned(trainer, batch):
    """Every sampled token has the candidates of its own position, and no other has any."""
    tokenizer = make_tokenizer()
    model = tiny.model(len(tokenizer))
    model.load_state_dict(trainer.model.state_dict())
    model.eval()
    errors, unlikely, calls, cut, rolled_back = [], 0, set(), 0, 0
    for (prompt_ids, completion_ids, ids, logps), tool_mask in zip(unpadded(batch), batch["tool_mask"], strict=True):
        text = tokenizer.decode(completion_ids)
        sampled = [token for token, own in zip(completion_ids, tool_mask.tolist(), strict=False) if own]
        # The tool's part: from the end of a call to the beginning of the assistant's next turn
        assert tokenizer.decode(sampled) == re.sub(r"\n<start>user\n.*?<start>assistant\n", "", text, flags=re.DOTALL)

        full = reference_logps(model, prompt_ids, completion_ids)
        for t, token in enumerate(completion_ids):
            if not tool_mask[t]:
                assert (ids[t] == -1).all() and logps[t, 0].isnan()
                continue
            filled = ids[t] >= 0
            assert ids[t, 0] == token and filled.sum() in (TOP_K, TOP_K + 1)
            errors += (logps[t][filled].exp() - full[t][ids[t][filled].long()].exp()).abs().tolist()
            unlikely += token != full[t].argmax()
        calls.add(text.count("<result>"))
        cut += "<result>" in text and not text.endswith("<eos>") and len(completion_ids) == MAX_COMPLETION_LENGTH
        rolled_back += text.endswith(CALL[1] + "<eos>")
    assert len(errors) > 1000 and np.mean(errors) < ENGINE_NOISE
    assert unlikely > 50
    assert {1, 2} <= calls and cut and rolled_back, "tool calls in one and two turns, a cut answer, a dropped result"


@pytest.mark.vllm
@pytest.mark.slow
def test_top_k_is_aligned_over_tool_calls(engine):
    assert_aligned(engine, rollout(engine))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 1])
def test_one_tool_token_more_or_less_is_noticed(on_engine, monkeypatch, shift):
    """As if TRL put one 0.0 too few or too many in the place of the tool's tokens."""
    loop = GRPOTrainer._tool_call_loop

    def shifted(self, *args):
        output = list(loop(self, *args))
        for row, sequence in enumerate(output[3]):
            if 0.0 in sequence:
                at = sequence.index(0.0)
                output[3][row] = (sequence[:at] + [0.0] * (1 + shift) + sequence[at + 1 :])[: len(sequence)]
        return tuple(output)

    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", shifted)
    with pytest.raises(ValueError, match="not aligned with its tokens"):
        rollout(on_engine(reward_funcs=length_of_answer, tools=[look]))


@pytest.mark.vllm
@pytest.mark.slow
def test_top_k_is_aligned_in_an_environment(on_engine):
    trainer = on_engine(environment_factory=Shelf)
    batch = rollout(trainer)
    assert_aligned(trainer, batch)
    assert {environment.looks for environment in trainer.environments} >= {1, 2}


@pytest.mark.vllm
@pytest.mark.slow
def test_training_with_tools(on_engine):
    trainer = on_engine(reward_funcs=length_of_answer, tools=[look])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    logs = [log for log in trainer.state.log_history if "trust_region/divergence_mean" in log]
    assert len(logs) == 4
    for log in logs:
        assert log["trust_region/unscored"] == 0, "tool tokens are none of the policy's"
        assert math.isfinite(log["grad_norm"]) and log["grad_norm"] > 0
    assert logs[0]["tools/call_frequency"] > 0.5
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert_aligned(trainer, rollout(trainer))
