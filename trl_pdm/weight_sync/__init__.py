"""Training weights into vLLM, so that the engine samples from the policy that is trained.

Two strategies: *full* moves every parameter, with the adapter merged and a quantized base dequantized; *adapter* moves
the base once and then only the LoRA matrices, which vLLM serves next to it. A merged weight must be rounded to the
engine's dtype; an adapter beside the base need not be, and is a small fraction of the bytes.
"""

WEIGHT_SYNCS = ("auto", "full", "adapter")
WEIGHT_ROUNDINGS = ("auto", "nearest", "stochastic")
ENGINE_DTYPES = ("auto", "bfloat16", "float16", "float32")
