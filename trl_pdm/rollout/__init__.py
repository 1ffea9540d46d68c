"""The behaviour policy's top K, from the engine that sampled the tokens to the batch that trains on them."""

from .candidates import Candidates, TokenLogprob, collate, from_lists
from .functions import fill_in, lack_candidates, with_candidates
from .own_policy import score_behavior
from .vllm import TopKVLLMGeneration, all_nan, from_vllm_outputs


__all__ = [
    "Candidates",
    "TokenLogprob",
    "TopKVLLMGeneration",
    "all_nan",
    "collate",
    "fill_in",
    "from_lists",
    "from_vllm_outputs",
    "lack_candidates",
    "score_behavior",
    "with_candidates",
]
