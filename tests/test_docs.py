"""What the documents promise: numbers that a command prints, the metrics that are declared, links that lead somewhere."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import metrics_table


ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
sys.path.insert(0, str(ROOT / "examples"))

import worked_example  # noqa: E402


# ---- The worked example


def test_page_quotes_what_the_worked_example_prints(capsys):
    worked_example.main()
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    _, quoted = page.split("<!-- printed by: python examples/worked_example.py -->\n```text\n")
    assert quoted.partition("```\n")[0] == capsys.readouterr().out


def derivative(sampled, categories):
    """Of the KL over `categories` of tokens, along `e_a - pi` in the logits: its value, and `d` by autograd."""
    logits = worked_example.POLICY.log().requires_grad_()
    pi = logits.softmax(-1)
    mu, pi_c = (torch.stack([p[list(c)].sum() for c in categories]) for p in (worked_example.BEHAVIOR, pi))
    kl = (mu * (mu / pi_c).log()).sum()
    (gradient,) = torch.autograd.grad(kl, logits)
    return kl.item(), (gradient[sampled] - gradient @ pi.detach()).item()


@pytest.mark.parametrize("sampled", range(5))
def test_worked_example_against_autograd(sampled):
    kl, change = derivative(sampled, [[j] for j in range(5)])
    result = worked_example.assess(sampled, 5)
    assert result.divergence.item() == pytest.approx(kl, abs=1e-12)
    assert result.predicted_change.item() == pytest.approx(change, abs=1e-12)
    # The step that the page measures leads where `d` says
    assert (worked_example.after_a_step(sampled) - kl) * change > 0


def test_worked_example_shows_a_tail_that_predicts_the_wrong_sign():
    _, change = derivative(4, [[4], [0], [1, 2, 3]])
    exact, aggregated = (
        worked_example.assess(4, 1, tail_estimator=name).predicted_change.item() for name in ("exact", "aggregated")
    )
    assert exact == pytest.approx(change, abs=1e-12) and exact < 0 < aggregated


def test_worked_example_has_a_token_on_which_ratio_and_prediction_disagree():
    by_ratio, by_prediction = (worked_example.assess(4, 5, direction=name) for name in ("ratio", "predictive"))
    assert by_ratio.outside and not by_ratio.keep and by_prediction.keep


# ---- The metrics


def test_table_of_metrics_is_the_declaration():
    """To make it anew: `python -m tests.helpers.metrics_table`."""
    page = metrics_table.PAGE.read_text()
    assert metrics_table.table() in page, test_table_of_metrics_is_the_declaration.__doc__
    assert metrics_table.replaced(page) == page


def test_troubleshooting_names_metrics_that_exist():
    rows = metrics_table.PAGE.read_text().partition("## Troubleshooting")[2]
    declared = {name.rpartition("/")[2] for name in re.findall(r"(?m)^\| `([\w/]+)`", metrics_table.table())}
    symptoms = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| ")][1:]
    named = [name.rpartition("/")[2] for symptom in symptoms for name in re.findall(r"`([\w/]+)`", symptom)]
    assert len(named) > 10 and set(named) <= declared, set(named) - declared


# ---- Links


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if "://" not in link:
                yield pytest.param(document, link, id=f"{document.stem}-{link}")


@pytest.mark.parametrize("document, link", list(links()))
def test_relative_link_leads_somewhere(document, link):
    name, _, anchor = link.partition("#")
    target = document.parent / name if name else document
    assert target.exists()
    assert not anchor or anchor in anchors(target)
