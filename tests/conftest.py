"""What all tests share: the environment they run in, and the rules for tests marked `vllm` and `gpu`.

Where `import vllm` fails they are skipped, with the reason in the summary. With `TRL_PDM_REQUIRE_VLLM=1`, as CI sets it,
a skipped vLLM test is an error and a run in which no vLLM test passed fails. Tests of a GPU run with `-m gpu` only.
"""

import functools
import gc
import importlib.metadata
import logging
import os
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings


# Read by vLLM and the tokenizers when they are imported, which test modules do after this one.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The models are tiny: more threads gain nothing, and on a busy machine they wait for each other most of the time.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_AOT_COMPILE": "0",  # the CPU build cannot load what it saves, so each engine would compile anew
}.items():
    os.environ.setdefault(name, value)

# The first call of an operator can take a second or more: hypothesis's deadline of 200 ms would make tests flaky.
settings.register_profile("trl_pdm", deadline=None)
settings.load_profile("trl_pdm")

# Accelerate asks for packages' metadata whenever it unwraps a model: to read them again is a quarter of a tiny training.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

# A worker of xdist takes whole files: those that take long first, so that none is left running alone at the end. Those of
# rollout/ come before weight_sync/: after test_architectures.py an engine of theirs was seen to lose its process groups.
FIRST = [
    "examples/test_train_pdm.py",
    "gpu/test_triton_path.py",
    "rollout/test_vllm.py",
    "rollout/test_tools.py",
    "rollout/test_weights_version.py",
    "test_bad_input.py",
    "test_stock_metrics.py",
    "weight_sync/test_engine.py",
    "weight_sync/test_check.py",
    "weight_sync/test_architectures.py",
    "gpu/test_make_gpu.py",
    "examples/test_compare_masks.py",
    "examples/test_notebook.py",
    "examples/test_alignment_study.py",
    "report/test_page.py",
    "test_distributed.py",
    "test_faults.py",
]

REQUIRE_VLLM = os.environ.get("TRL_PDM_REQUIRE_VLLM") == "1"
VLLM_TESTS_PASSED = pytest.StashKey[int]()
GPU_TESTS_LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture(scope="module", autouse=True)
def environment_for_later_processes():
    """TRL sets these for a colocated engine. Processes that later modules start would take themselves for its peers."""
    with own_rendezvous():
        yield


@pytest.fixture(autouse=True)
def own_state():
    """A port that no other run on this machine wants, and nothing of accelerate's that a failure left half made."""
    with own_rendezvous():
        yield
    if accelerate := sys.modules.get("accelerate"):  # those that do not need it need not wait for it
        state = accelerate.PartialState._shared_state
        if state and "num_processes" not in state:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def own_rendezvous():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with socket.socket() as probe:
        probe.bind(("", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


def why_no_vllm() -> str | None:
    try:
        import vllm  # noqa: F401
    except Exception as error:  # a vLLM that does not match its torch raises more than ImportError
        return f"vLLM cannot be imported ({type(error).__name__}: {error})"
    return None


def no_vllm_test_passed(config) -> bool:
    whole_run = not hasattr(config, "workerinput")  # a worker of xdist sees a part
    return whole_run and REQUIRE_VLLM and not config.option.collectonly and config.stash[VLLM_TESTS_PASSED] == 0


def pytest_configure(config):
    config.stash[VLLM_TESTS_PASSED] = config.stash[GPU_TESTS_LEFT_OUT] = 0
    config.pluginmanager.register(Counts(config))


@pytest.hookimpl(trylast=True)  # after -m and -k: vLLM is imported only if a test that needs it will run
def pytest_collection_modifyitems(config, items):
    if "gpu" not in config.option.markexpr and (of_gpu := [item for item in items if item.get_closest_marker("gpu")]):
        config.hook.pytest_deselected(items=of_gpu)
        config.stash[GPU_TESTS_LEFT_OUT] = len(of_gpu)
        items[:] = [item for item in items if item not in of_gpu]
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(FIRST)}
    items.sort(key=lambda item: turns.get(item.path, len(FIRST)))
    needing_vllm = [item for item in items if item.get_closest_marker("vllm")]
    if needing_vllm and not config.option.collectonly and (reason := why_no_vllm()):
        for item in needing_vllm:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    # `Trainer.train` collects garbage. What the imports left is none, and walking it each time takes a second.
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.get_closest_marker("vllm") and REQUIRE_VLLM and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a vLLM test may not be skipped under TRL_PDM_REQUIRE_VLLM=1: {call.excinfo.value}"
    return report


class Counts:
    """Of the whole run, whose reports reach it from all workers of xdist."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and "vllm" in report.keywords:
            self.config.stash[VLLM_TESTS_PASSED] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.config.stash[GPU_TESTS_LEFT_OUT] = getattr(node, "workeroutput", {}).get("gpu_tests_left_out", 0)


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_tests_left_out"] = session.config.stash[GPU_TESTS_LEFT_OUT]
    if no_vllm_test_passed(session.config) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if left_out := config.stash[GPU_TESTS_LEFT_OUT]:
        terminalreporter.write_line(f"{left_out} tests of a GPU are left out; `make gpu` runs them where there is one")
    if no_vllm_test_passed(config):
        terminalreporter.write_line("FAILED: TRL_PDM_REQUIRE_VLLM=1, and no test marked vllm passed", red=True)


def pytest_unconfigure(config):
    # vLLM's shutdown at exit logs to the stream pytest has closed by then: no tracebacks after pytest's closing line.
    logging.raiseExceptions = False
