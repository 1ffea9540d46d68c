"""Write the table of metrics in the docs from their declaration: `python -m tests.helpers.metrics_table`."""

from pathlib import Path

from trl_pdm.metrics import METRICS, TokenMetric


PAGE = Path(__file__).parents[2] / "docs" / "metrics-and-troubleshooting.md"
HEADER = "| metric | kind | over which tokens | meaning |\n|---|---|---|---|\n"


def table() -> str:
    over = {m: m.over.meaning if isinstance(m, TokenMetric) else "" for m in METRICS}
    rows = ((f"`{m.name}`", m.kind, over[m], m.meaning) for m in METRICS)
    return HEADER + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def replaced(page: str) -> str:
    """The page with its table made anew."""
    before, header, rest = page.partition(HEADER)
    assert header, f"{PAGE.name} has no table that begins with {HEADER!r}"
    return before + table() + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
