"""What the examples train on: problems, rewards, and the supervised start that a model needs to earn any reward.

A problem is a row with a `prompt` and, where its answer can be checked, a `solution`. A reward takes `completions`, each a
chat of one message, and the columns of their rows.
"""

import random
import re
from functools import cache
from itertools import combinations_with_replacement

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)


# ---- Problems with one right answer, for a small model that reads characters


def addition(a, b):
    return {"prompt": f"{a}+{b}=", "solution": f"{a + b}"}


def sums(seed=0, held_out=500):
    """All sums of two two-digit numbers, in two lists: those to train on, and those of `held_out` pairs of numbers,
    which are trained on in neither order."""
    pairs = [{(a, b), (b, a)} for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [[addition(a, b) for a, b in sorted(pair)] for pair in pairs]
    return sum(rows[held_out:], []), sum(rows[:held_out], [])


@cache
def sums_once():
    """All sums of two two-digit numbers, each in one of its two orders, in a fixed random order."""
    draw = random.Random(0)
    pairs = [draw.sample(pair, 2) for pair in combinations_with_replacement(range(10, 100), 2)]
    draw.shuffle(pairs)
    return [addition(a, b) for a, b in pairs]


def selection_sort(word):
    """`dbca` -> `adbc bdc cd d=abcd`: each step names the smallest letter left, then what remains without it."""
    remaining, steps = word, []
    while remaining:
        smallest = min(remaining)
        remaining = remaining.replace(smallest, "", 1)
        steps.append(smallest + remaining)
    return " ".join(steps) + "=" + "".join(step[0] for step in steps)


@cache
def words(n=10_000):
    """Five different letters each, in a fixed random order; no two words have the same letters."""
    draw, found = random.Random(0), {}
    while len(found) < n:
        word = "".join(draw.sample("abcdefghijklmnopqrstuvwxyz", 5))
        found.setdefault("".join(sorted(word)), word)
    return [{"prompt": f"{word}:", "solution": selection_sort(word)} for word in found.values()]


def exact_match(completions, solution, **kwargs):
    return [float(chat[-1]["content"] == answer) for chat, answer in zip(completions, solution, strict=True)]


def sorted_right(completions, solution, **kwargs):
    """1 where the letters after the last `=` are in order, whatever came before them."""
    answers = [chat[-1]["content"].rpartition("=")[2] for chat in completions]
    return [float(answer == right.rpartition("=")[2]) for answer, right in zip(answers, solution, strict=True)]


# Rows, and what makes a completion right
TASKS = {"addition": (sums_once, exact_match), "sorting": (words, sorted_right)}


# ---- Chats


def as_chat(row):
    columns = ("prompt", "problem", "question"), ("solution", "answer")
    question, answer = (next((row[name] for name in names if name in row), None) for names in columns)
    if question is None or answer is None:
        raise ValueError(
            f"The dataset needs one of the columns {columns[0]} and one of {columns[1]}, got {list(row)}."
        )
    prompt = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return {"prompt": prompt, "solution": str(answer)}


def chats(rows):
    return Dataset.from_list([as_chat(row) for row in rows])


def to_ids(tokenizer, prompts):
    return tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, tokenize=True, return_dict=False)


# ---- Problems for an instruction-tuned model


THINGS = """
an anchor, an apple, an apron, a banjo, a barn, a basket, a beach, a bell, a bicycle, a blanket, a boat, a book, a bottle,
a bridge, a broom, a bucket, a butterfly, a cactus, a camel, a candle, a canyon, a carpet, a castle, a cat, a chair,
a chimney, a clock, a cloud, a coat, a coin, a compass, a cow, a crab, a crow, a cup, a curtain, a desert, a diamond, a dog,
a dolphin, a donkey, a door, a dragon, a drum, a duck, an eagle, an elephant, an engine, a farm, a feather, a fence, a fire,
a fish, a flag, a flower, a flute, a forest, a fountain, a fox, a frog, a garden, a ghost, a giraffe, a glacier, a glove,
a goat, a guitar, a hammer, a harbor, a hat, a hill, a honeybee, a horse, a hotel, an iceberg, an island, a jacket,
a jar, a jungle, a kettle, a key, a kitchen, a kite, a ladder, a lake, a lamp, a lemon, a library, a lighthouse, a lion,
a lizard, a map, a market, a meadow, a mirror, a monkey, the moon, a mountain, a mouse, a museum, a mushroom, a needle,
an oak, an ocean, an onion, an orchard, an owl, a painting, a palace, a parrot, a pencil, a penguin, a piano, a pillow,
a pirate, a planet, a pond, a potato, a pumpkin, a rabbit, a radio, a rainbow, a river, a robot, a rocket, a rose, a salmon,
a school, a shadow, a sheep, a ship, a shoe, a snail, a snowman, a spider, a spoon, a squirrel, a stone, a storm, a street,
the sun, a swan, a table, a tailor, a teapot, a telescope, a tent, a tiger, a tomato, a tower, a train, a tree, a trumpet,
a tunnel, a turtle, an umbrella, a valley, a village, a violin, a volcano, a wagon, a waterfall, a whale, a wheel,
a whistle, a window, a wolf, a zebra
"""
SHORTEST = 8  # words: fewer are judged as if the missing ones had the letter


def writing():
    """One sentence about a thing: a dense reward, and a policy that can collapse."""
    things = " ".join(THINGS.split()).split(", ")
    random.Random(0).shuffle(things)
    return [asked(f"Write one sentence about {thing}.", "") for thing in things]


def asked(question, solution):
    """A chat with a system message of its own: the template of SmolLM2 gives one of 17 tokens otherwise, and in a study on a
    CPU each token counts."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return {"prompt": chat, "solution": solution}


def arithmetic():
    """A sum in the form asked for: the reward is 0 or 1, and the answer is one."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    text = "Add {a} and {b}. Answer with the equation only, like 2 + 3 = 5."
    return [asked(text.format(a=a, b=b), f"{a} + {b} = {a + b}") for a, b in pairs]


def without_e(completions, log_metric=None, **kwargs):
    """The share of words without the letter e, each counted once: a policy that repeats one word earns nothing by it."""
    found = [re.findall(r"[a-z]+(?:'[a-z]+)*", chat[-1]["content"].lower()) for chat in completions]
    if log_metric is not None:
        log_metric("writing/words", sum(map(len, found)) / len(found))
        log_metric("writing/distinct_words", sum(len(set(words)) for words in found) / len(found))
    return [sum("e" not in word for word in set(words)) / max(SHORTEST, len(words)) for words in found]


INSTRUCT_TASKS = {"writing": (writing, without_e), "arithmetic": (arithmetic, exact_match)}


# ---- Supervised training, and what came of it


def teach(model, tokenizer, rows, accuracy, learning_rate, batch_size):
    """Train on the solutions of `rows`, until greedy decoding gets about `accuracy` of them right."""
    prompts = to_ids(tokenizer, [row["prompt"] for row in map(as_chat, rows)])
    answers = tokenizer([row["solution"] + tokenizer.eos_token for row in rows], add_special_tokens=False).input_ids
    pairs = list(zip(prompts, answers, strict=True))

    def pad(sequences, value):
        return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, sequences)), True, value)

    ids = pad([prompt + answer for prompt, answer in pairs], tokenizer.pad_token_id)
    labels = pad([[-100] * len(prompt) + answer for prompt, answer in pairs], -100)
    optimizer, reached = torch.optim.AdamW(model.parameters(), lr=learning_rate), 0.0
    while reached < accuracy:
        batch = torch.randint(len(ids), (batch_size,))
        output = model(ids[batch], labels=labels[batch])
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guessed, wanted = output.logits[:, :-1].argmax(-1), labels[batch, 1:]
        right = ((guessed == wanted) | (wanted == -100)).all(1)  # if all are likeliest, greedy decoding says them
        reached = 0.8 * reached + 0.2 * right.float().mean().item()


def warm_start(folder, rows, accuracy, seed=0):
    """Save a small Qwen3 that gets `accuracy` of `rows` right, with a tokenizer of single characters."""
    set_seed(seed)
    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    size = dict(num_hidden_layers=2, hidden_size=128, intermediate_size=256, head_dim=32, num_attention_heads=4)
    size |= dict(num_key_value_heads=4, tie_word_embeddings=True, initializer_range=0.05)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(vocab), pad_token_id=0, eos_token_id=1, **size))
    teach(model, tokenizer, rows, accuracy, learning_rate=2e-3, batch_size=128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start_from(model, folder, rows, accuracy, seed=0):
    """Teach an instruction-tuned `model` (a folder or name) until it gets `accuracy` of `rows` right, and save it."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    taught = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    teach(taught, tokenizer, rows, accuracy, learning_rate=2e-5, batch_size=16)
    taught.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def greedy_accuracy(model, tokenizer, problems, reward, max_new_tokens):
    """The mean reward of greedy completions of `problems`, whose prompts are chats."""
    inputs = tokenizer.apply_chat_template(
        list(problems["prompt"]),
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        tokenizer_kwargs=dict(padding_side="left"),
    ).to(model.device)
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    answers = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    rewards = reward(completions=completions, solution=list(problems["solution"]))
    return sum(right or 0.0 for right in rewards) / len(rewards)
