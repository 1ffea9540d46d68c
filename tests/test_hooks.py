"""Canaries: each place that reaches into TRL fails with a sentence when TRL has moved."""

import re
import tomllib
from pathlib import Path

import pytest
import trl
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from tests.test_trainer import make_batch, make_trainer
from trl_pdm._hooks import SUPPORTED_TRL, TRLCompatibilityError, substituted


WHERE = re.escape(f"TRL {trl.__version__} is installed, trl{SUPPORTED_TRL} is supported")


def test_supported_range_is_the_packages_own():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"trl{SUPPORTED_TRL}" in project["dependencies"]


def test_substitution_is_undone_and_needs_the_name():
    original = grpo_trainer.VLLMGeneration
    with pytest.raises(RuntimeError, match="inside"), substituted(grpo_trainer, VLLMGeneration=None):
        assert grpo_trainer.VLLMGeneration is None
        raise RuntimeError("inside")
    assert grpo_trainer.VLLMGeneration is original
    with pytest.raises(TRLCompatibilityError, match=WHERE), substituted(grpo_trainer, VLLMBackend=None):
        pass


@pytest.mark.parametrize("name", ["VLLMGeneration", "GRPOConfig"])
def test_names_looked_up_at_construction(tmp_path, monkeypatch, name):
    monkeypatch.delattr(grpo_trainer, name)
    with pytest.raises(TRLCompatibilityError, match=f"no longer has `{name}`.*{WHERE}"):
        make_trainer(tmp_path)


def test_generate_returns_other_values(tmp_path, monkeypatch):
    generate = GRPOTrainer._generate
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: (*generate(self, prompts), None))
    trainer = make_trainer(tmp_path, max_steps=1)
    with pytest.raises(TRLCompatibilityError, match=f"`GRPOTrainer._generate`.*{WHERE}"):
        trainer.train()


def test_scoring_phase_scores_no_policy(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, max_steps=1, steps_per_generation=4)
    # TRL skips its scoring when it believes that steps are aligned
    original = GRPOTrainer._generate_and_score_completions

    def aligned(self, inputs):
        self.args.steps_per_generation = 2
        return original(self, inputs)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", aligned)
    with pytest.raises(TRLCompatibilityError, match=f"scores a rollout's policy first.*{WHERE}"):
        trainer.train()


def test_advantages_read_before_scoring(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].sum())
    with pytest.raises(TRLCompatibilityError, match=f"reads the advantages before scoring.*{WHERE}"):
        trainer.compute_loss(trainer.model, batch)


def test_loss_that_never_scores(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs.get("advantages", 0))
    with pytest.raises(TRLCompatibilityError, match=WHERE):
        trainer.compute_loss(trainer.model, batch)


def test_behaviour_logprobs_ignored(tmp_path, monkeypatch):
    """TRL reads `old_per_token_logps` with `.get`: were it to stop, the loss would have no ratio."""
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    read = set()

    class Watched(dict):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    loss = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: loss(self, model, _watch(inputs)))

    def _watch(inputs):
        trainer._loss_inputs = watched = Watched(inputs)
        return watched

    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch)
    assert {"advantages", "old_per_token_logps"} <= read
