"""What the examples train on: problems with their solutions, and how completions are judged."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tasks  # noqa: E402
from compare_masks import StudyArguments  # noqa: E402


def test_reference_solutions_of_sorting():
    rows = tasks.words(300)
    assert len({"".join(sorted(row["prompt"])) for row in rows}) == 300
    for row in rows:
        word = row["prompt"].removesuffix(":")
        in_order = sorted(word)
        steps = [smallest + "".join(letter for letter in word if letter > smallest) for smallest in in_order]
        assert row["solution"] == " ".join(steps) + "=" + "".join(in_order)
    assert 20 < len(rows[0]["solution"]) + 1 <= StudyArguments().max_completion_length


def test_reference_solutions_of_addition():
    rows = tasks.sums_once()
    assert all(eval(row["prompt"].removesuffix("=")) == int(row["solution"]) for row in rows)
    assert len({frozenset(row["prompt"][:-1].split("+")) for row in rows}) == len(rows) == 90 * 91 // 2


def test_held_out_sums_are_in_neither_order_elsewhere():
    train, held_out = tasks.sums(seed=3)
    rows = train + held_out
    assert all(eval(row["prompt"].removesuffix("=")) == int(row["solution"]) for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows) == 90 * 90
    pairs, others = ({frozenset(row["prompt"][:-1].split("+")) for row in half} for half in (held_out, train))
    assert len(pairs) == 500 and not pairs & others
    assert tasks.sums(seed=4)[1] != held_out == tasks.sums(seed=3)[1]


def test_sorting_is_judged_by_the_final_answer():
    texts = ["adbc bdc cd d=abcd", "nonsense=abcd", "abcd", "adbc bdc cd d=abdc", "=abcd=", ""]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert tasks.sorted_right(chats, ["adbc bdc cd d=abcd"] * 6) == [1, 1, 1, 0, 0, 0]


def test_words_without_e_are_counted_by_hand():
    texts = [
        "A dog ran to a big old barn.",
        "The sea, the sea!",
        "Go",
        "",
        "Don't panic: it is only a 2nd tall giraffe",
    ]
    logged = {}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = tasks.without_e(completions=completions, log_metric=logged.__setitem__)
    # A word counts once; fewer than eight count as eight; the digit is no word
    assert rewards == [7 / 8, 0, 1 / 8, 0, 8 / 9]
    assert logged == {"writing/words": (8 + 4 + 1 + 0 + 9) / 5, "writing/distinct_words": (7 + 2 + 1 + 0 + 9) / 5}
    assert tasks.without_e(completions=completions) == rewards


def test_problems_for_an_instruction_tuned_model():
    for task, (rows, _) in tasks.INSTRUCT_TASKS.items():
        prompts = [row["prompt"][-1]["content"] for row in rows()]
        assert len(set(prompts)) == len(prompts) > 150, task
        assert rows() == rows(), "in a fixed order, so that what is held out stays held out"
    for row in tasks.arithmetic():
        left, right = row["solution"].split(" = ")
        question = row["prompt"][-1]["content"]
        assert eval(left) == int(right) and all(number in question for number in left.split(" + "))


def test_teaching_a_chat_model_is_on_its_answers(tmp_path):
    """Prompts of different lengths: what greedy decoding answers afterwards says whether the labels were the answers."""
    rows = [{"prompt": f"{'ab' * n} {n}?", "solution": f"{n} {n}"} for n in range(2, 8)]
    tasks.warm_start(tmp_path / "base", rows, accuracy=0.0)
    model, tokenizer = (auto.from_pretrained(tmp_path / "base") for auto in (AutoModelForCausalLM, AutoTokenizer))
    problems = tasks.chats(rows)
    assert tasks.greedy_accuracy(model, tokenizer, problems, tasks.exact_match, 8) == 0
    tasks.teach(model, tokenizer, rows, accuracy=0.98, learning_rate=2e-3, batch_size=16)
    assert tasks.greedy_accuracy(model, tokenizer, problems, tasks.exact_match, 8) == 1
    prompt = tokenizer(rows[-1]["prompt"], return_tensors="pt")
    assert model(**prompt, labels=prompt.input_ids).loss > 2, "prompts are not learned"
