"""Two rewards of your own. TRL calls them with keywords: the completions, and the columns of their rows."""


def brief(completions, **kwargs):
    """1 for an empty completion, halved with every 400 characters."""
    return [0.5 ** (len(chat[-1]["content"]) / 400) for chat in completions]


def says_the_answer(completions, solution, **kwargs):
    """1 if the answer is somewhere in the last line, otherwise 0."""
    lines = [chat[-1]["content"].strip().rpartition("\n")[2] for chat in completions]
    return [float(answer in line) for line, answer in zip(lines, solution, strict=True)]
