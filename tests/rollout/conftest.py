"""One engine for the tests of a module."""

from functools import partial

import pytest
import torch
from trl.generation import vllm_generation

from tests.rollout.helpers import ENGINE, make_trainer, sync


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A trainer with a vLLM engine, whose weights have moved since the engine loaded them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True))
        trainer = make_trainer(tmp_path_factory.mktemp("engine"), **ENGINE)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(parameter.std() * 0.3 * torch.randn_like(parameter))
    return sync(trainer)


@pytest.fixture
def on_engine(engine, tmp_path, monkeypatch):
    """Other trainers, with the same weights and on the running engine."""

    def make(rollout_func=None, **args):
        monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: engine.vllm_generation.llm)
        trainer = make_trainer(tmp_path, rollout_func, **ENGINE | args)
        trainer.model.load_state_dict(engine.model.state_dict())
        return sync(trainer)

    return make
