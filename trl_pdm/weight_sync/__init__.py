"""Training weights into vLLM, so that the engine samples from the policy that is trained.

There are two strategies. *Full* moves every parameter, with the adapter merged and a quantized base dequantized.
*Adapter* moves the base once and then only the LoRA matrices, which vLLM serves next to it. They are a small fraction
of the bytes, and rounding them to the engine's dtype takes far less from an update than rounding merged weights does.
"""

WEIGHT_SYNCS = ("auto", "full", "adapter")
WEIGHT_ROUNDINGS = ("auto", "nearest", "stochastic")
ENGINE_DTYPES = ("auto", "bfloat16", "float16", "float32")
