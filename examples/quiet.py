"""Silences, by name, what other packages say at every start and no user of the examples can act on. All else is shown.

Import it before torch, transformers and vLLM, because some of them speak while they are imported.
"""

import importlib
import logging
import os
import warnings
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version


# By logger, how the messages to silence begin
NOTICES = {
    "DeepSpeed": ["Setting accelerator to CPU"],
    "vllm.triton_utils.importing": ["Triton is installed, but", "Triton is not installed"],
    "vllm.platforms.cpu": ["Triton is not installed"],
    "vllm.config.scheduler": ["max_num_batched_tokens ("],  # few short sequences, so more room than they can fill
    "vllm.config.vllm": ["Model Runner V2 requires Triton"],
    "vllm.model_executor.layers.indexer_topk": ["Failed to import the DeepSelect extension"],
    "vllm.model_executor.layers.utils": ["Failed to create oneDNN linear"],
    "vllm.v1.worker.cpu_worker": [
        "libtcmalloc is not found",
        "libiomp is not found",
        "CPU backend doesn't allow to use",
    ],
}


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",  # no banner; a sync that leaves weights behind is a warning
    "TOKENIZERS_PARALLELISM": "false",  # or tokenizers warn when a process forks
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's note about memory and NUMA
}


def _is_news(record, notices):
    return not record.getMessage().startswith(tuple(notices))


with suppress(PackageNotFoundError):
    version("vllm-cpu")
    ENVIRONMENT["VLLM_USE_AOT_COMPILE"] = "0"  # it cannot load what it saves, so each start would compile anew

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
for name, notices in NOTICES.items():
    logging.getLogger(name).addFilter(partial(_is_news, notices=notices))
warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")
warnings.filterwarnings("ignore", message="IProgress not found")  # a bar of text does as well


def bars(use_vllm):
    """Turn all progress bars off but the training's. To be called before a model is loaded."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if use_vllm:
        loader = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
        loader.enable_tqdm = lambda use_tqdm_on_load: False
