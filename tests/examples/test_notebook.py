"""The notebook in the repository is clean, and runs from top to bottom."""

import base64
import io
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image


NOTEBOOK = Path(__file__).parents[2] / "examples" / "pdm_quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell, kind):
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


def test_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    assert [cell.source for cell in code_cells(notebook) if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.slow
def test_top_to_bottom(notebook, tmp_path):
    """On its default, without vLLM and shorter: what the settings cell is there for."""
    settings = next(cell for cell in code_cells(notebook) if cell.source.startswith("from trl.import_utils"))
    for name, value in {"STEPS": 40, "USE_VLLM": False, "OUTPUT_DIR": str(tmp_path)}.items():
        settings.source, replaced = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", settings.source)
        assert replaced == 1
    # Jupyter starts a notebook in its own folder
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    environment = os.environ | {"IPYTHONDIR": str(tmp_path / "ipython")}
    NotebookClient(notebook, timeout=300, resources=resources).execute(env=environment)

    *_, reward, plots, answers = code_cells(notebook)
    assert len(outputs(reward, "image/png")) == 1
    said = "".join(o.text for c in code_cells(notebook) for o in c.outputs if o.get("name") == "stderr")
    assert not re.search("(?i)warning|deprecated|triton|forked", said), said
    (picture,) = outputs(plots, "image/png")
    colours = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").getcolors(2**24)
    assert {(31, 119, 180), (255, 127, 14)} <= {colour for _, colour in colours}, "curves in matplotlib's first two"
    (table,) = outputs(plots, "text/html")
    rows = [
        [float(cell) for cell in re.findall(r"<td>(.*?)</td>", row)]
        for row in re.findall(r"(?s)<tr>(.*?)</tr>", table)
    ]
    steps = [row for row in rows if row]
    assert len(steps) == 40 // 8
    assert all(outside >= masked for _, outside, masked, _ in steps) and any(masked > 0 for _, _, masked, _ in steps)

    text = "".join(output.text for output in answers.outputs)
    sums = re.findall(r"(?m)^(\d\d)\+(\d\d)=(\d*) ", text)
    right = sum(int(a) + int(b) == int(answer or -1) for a, b, answer in sums)
    assert len(sums) == 8 and right >= 2
    before, after = map(int, re.search(r"(\d+) before, (\d+) after", text).groups())
    assert after > before + 20, "the model learned nothing"
