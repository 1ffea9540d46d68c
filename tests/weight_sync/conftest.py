"""One engine of a kind for all tests of the weight sync: trainers take turns on it."""

import gc
import logging

import pytest
from accelerate import PartialState
from transformers import AutoConfig
from trl.generation import vllm_generation


# Compiled, as engines are by default; to compile takes twice the time of the rest of a start
COMPILED = [("qwen3", False, None, None, None, "vllm", "None"), ("qwen3", True, 8, None, None, "vllm", "None")]


@pytest.fixture(autouse=True)
def accelerate_state():
    PartialState(cpu=True)  # which accelerate's logger asks who may log


@pytest.fixture(scope="package")
def started():
    engines = {}
    yield engines
    shut_down(engines)


def shut_down(engines):
    from vllm.distributed import cleanup_dist_env_and_memory

    engines.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def engine_args(started, monkeypatch):
    """Trainers of one kind take turns on one engine. Yields the arguments that the last one asked its engine for."""
    LLM, asked = vllm_generation.LLM, {}

    def engine(**kwargs):
        asked.clear()
        asked.update(kwargs)
        config = AutoConfig.from_pretrained(kwargs["model"])
        of_engine = (kwargs.get(name) for name in ("max_lora_rank", "load_format", "dtype", "model_impl"))
        kind = (config.model_type, config.tie_word_embeddings, *of_engine, str(kwargs.get("hf_overrides")))
        if not any(kind[0] == model_type for model_type, *_ in started):  # experts have process groups of their own
            shut_down(started)
        if kind not in started:
            eager = dict(enforce_eager=kind not in COMPILED)
            started[kind] = LLM(**eager | kwargs)
        for name in ("generate", "chat", "enqueue", "enqueue_chat"):  # what an earlier trainer has put there
            vars(started[kind]).pop(name, None)
        return started[kind]

    monkeypatch.setattr(vllm_generation, "LLM", engine)
    return asked


@pytest.fixture
def vllm_warnings(caplog):
    """vLLM's loggers do not propagate, and importing it sets their handlers."""
    import vllm  # noqa: F401

    logging.getLogger("vllm").addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    logging.getLogger("vllm").removeHandler(caplog.handler)
