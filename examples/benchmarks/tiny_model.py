"""The random model that the benchmarks measure where none is given: a Qwen3 of two layers that reads characters."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


SHAPE = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the printable characters, filled up to `vocab_size` (at least 97) with tokens that no text has."""
    vocab = ["<pad>", "<eos>", *map(chr, range(32, 127)), *(f"<{i}>" for i in range(97, vocab_size))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_lm(vocab_size: int, **shape: int) -> Qwen3ForCausalLM:
    config = dict(vocab_size=vocab_size, head_dim=32, eos_token_id=1, pad_token_id=0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | config | shape))


def tiny_model(folder: str, vocab_size: int = 97, **shape: int) -> str:
    """Save the model and its tokenizer as a Hugging Face folder."""
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    tiny_lm(vocab_size, **shape).save_pretrained(folder)
    return folder
