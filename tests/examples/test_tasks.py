"""What the examples train on: problems with their solutions, and how completions are judged."""

import sys
from pathlib import Path


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
