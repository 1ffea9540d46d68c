"""Recorded completions as a picture for a document: an SVG that is light or dark as its reader's theme is."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from .curves import THEMES
from .tokens import Completion, Recorded, Token


WIDTH, LINE, CHARACTER, MARGIN = 760, 30, 8.4, 14  # pixels
MAX_LINES = 12


def write_svg(recorded: Recorded, path: Path) -> None:
    """Draw what the colours mean, and below it the completions with the most masked tokens, on at most `MAX_LINES`."""
    lines = [[Token(state, "token", "", []), _plain(meaning)] for state, meaning in recorded.states.items()]
    for completion in sorted(recorded.completions, key=_masked, reverse=True):
        lines += _lines(completion)
    del lines[MAX_LINES:]
    height = LINE * len(lines) + MARGIN
    drawn = "".join(_drawn(line, LINE * number) for number, line in enumerate(lines, start=1))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<title>{escape(recorded.about)}</title><style>{_style()}</style>{drawn}</svg>\n",
        encoding="utf-8",
    )


def _plain(text: str) -> Token:
    return Token("plain", " ".join(text.split()), "", [])


def _masked(completion: Completion) -> int:
    return sum(token.state == "masked" for token in completion.tokens)


def _width(token: Token) -> float:
    return CHARACTER * len(token.text) + MARGIN


def _lines(completion: Completion) -> Iterator[list[Token]]:
    line: list[Token] = []
    for token in [_plain(completion.prompt), *completion.tokens]:
        if line and (line[-1].end or sum(map(_width, [*line, token])) > WIDTH - MARGIN):
            yield line
            line = []
        line.append(token)
    yield line


def _drawn(line: list[Token], baseline: int) -> str:
    column, parts = float(MARGIN), []
    for token in line:
        parts.append(
            f'<g class="{token.state}"><rect x="{column:g}" y="{baseline - 17}" width="{_width(token) - 6:g}" height="23" '
            f'rx="3"/><text x="{column + 4:g}" y="{baseline}" textLength="{CHARACTER * len(token.text):g}">'
            f"{escape(token.text)}</text></g>"
        )
        column += _width(token)
    return "".join(parts)


def _style() -> str:
    def colours(theme: str) -> str:
        return (
            "text{{fill:{ink}}}.plain text,.untrained text{{fill:{muted}}}.inside rect{{stroke:{line}}}"
            ".outside rect{{fill:{out};stroke:{out-edge}}}.masked rect{{fill:{mask};stroke:{mask-edge};stroke-width:2}}"
        ).format(**THEMES[theme])

    dark = f"@media(prefers-color-scheme:dark){{{colours('dark')}}}"
    return f"text{{font:14px monospace;white-space:pre}}rect{{fill:none}}{colours('light')}{dark}"
